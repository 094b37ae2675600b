"""The numerics id: replicas with the same one compute the same bits, so one may finish what another
began.

Covers every file of the engine core and of the kernels rather than a list of those that matter: a
new file counts without being named, and an id that changes too often only costs two versions the
exactness between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from headwater.kernels.launch import environment
from headwater.kernels.launch.environment import Environment

ROOMS = (Path(__file__).parents[1], Path(environment.__file__).parents[1])
"""The engine core and the kernels."""
DIGEST_BYTES = 8


def numerics_id(surroundings: Environment, *what: object, sources: bytes) -> str:
    """Hash of all that a bit of an answer depends on. `what` is the rest, by its `repr`: weights,
    model, formats."""
    digest = hashlib.blake2b(repr((surroundings, *what)).encode(), digest_size=DIGEST_BYTES)
    digest.update(sources)
    return digest.hexdigest()


def sources_with(others: Iterable[Path] = ()) -> bytes:
    """Digest of the engine core and the kernels with the files of another distribution's
    platform."""
    return _own_sources() + source_digest(others)


@cache
def _own_sources() -> bytes:
    # 30 ms: they are read once. A process goes on with what it has imported.
    return source_digest(ROOMS)


def source_digest(folders: Iterable[Path]) -> bytes:
    """Hash of all files in some folders, or of single files: their names and their bytes."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for folder in folders:
        for path in sorted(source_files(folder)):
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}".encode()
            text = path.read_bytes()
            # With lengths: what moves from the end of one file to the beginning of the next changes
            # the digest.
            digest.update(b"%d %d " % (len(name), len(text)) + name + text)
    return digest.digest()


def source_files(folder: Path) -> Iterator[Path]:
    """Every file below a folder but hidden ones and compiled code; of a file itself."""
    if folder.is_file():
        yield folder
        return
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from source_files(path)
        else:
            yield path
