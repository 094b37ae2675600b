"""Matrices in an order that a CPU's kernels read, packed once a machine into a file beside the
weights.

The file is mapped read-only, so replicas share its pages; those of the stored matrices are never
read again. Its name says what it was packed from and how, so what another version would lay out
otherwise is another file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .model_file import WEIGHTS_NAME

ALIGNMENT = 4096
Progress = Callable[[int, int], None]
"""(done, total) matrices"""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that is packed when it is asked for, since not all of them need be in memory at
    once."""

    layout: object
    """Layout of the packed matrix; its `repr` distinguishes layouts."""
    num_bytes: int
    write: Callable[[torch.Tensor], None]
    """Packs it into uint8 [num_bytes]."""


def packed_memory(
    matrices: Mapping[str, Matrix], folder: Path | None, progress: Progress, part: str = ""
) -> dict[str, torch.Tensor]:
    """The memory that each matrix is packed in, uint8.

    `folder` is the one that the matrices were loaded from, None if they come from nowhere. Where it
    cannot be written and holds no packed file, the matrices are packed into memory of this process.
    `part` names the part of the folder's weights that the matrices are: parts of equal shapes have
    files of their own.
    """
    if not matrices:
        return {}
    offsets, num_bytes = _offsets(matrices)
    memory = _mapped(matrices, offsets, num_bytes, folder, progress, part)
    return {name: memory[at : at + matrices[name].num_bytes] for name, at in offsets.items()}


def _mapped(
    matrices: Mapping[str, Matrix],
    offsets: Mapping[str, int],
    num_bytes: int,
    folder: Path | None,
    progress: Progress,
    part: str = "",
) -> torch.Tensor:
    """uint8 [num_bytes]: the packed matrices, in a file if there may be one."""
    if folder is None:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        _fill(memory, matrices, offsets, progress)
        return memory
    path = folder / f"packed-{_identity(folder, matrices, part)}.bin"
    if not path.is_file():
        try:
            _write(path, matrices, offsets, num_bytes, progress)
        except OSError:
            return _mapped(matrices, offsets, num_bytes, None, progress)
    progress(len(matrices), len(matrices))
    return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)


def _write(
    path: Path,
    matrices: Mapping[str, Matrix],
    offsets: Mapping[str, int],
    num_bytes: int,
    progress: Progress,
) -> None:
    """Writes the file, or waits for another process that does. Raises `OSError` where it cannot be
    written."""
    # The next process that packs these matrices reuses the file that a killed one left under this
    # name.
    partial = path.with_suffix(".partial")
    with partial.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.is_file():
            partial.unlink(missing_ok=True)
            return
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            written = torch.from_file(str(partial), shared=True, size=num_bytes, dtype=torch.uint8)
            _fill(written, matrices, offsets, progress)
            # A file that has its name before its bytes would hold zeros after a power failure.
            os.fsync(file.fileno())
        except OSError:
            file.truncate(0)
            raise
        partial.rename(path)


def _fill(
    memory: torch.Tensor,
    matrices: Mapping[str, Matrix],
    offsets: Mapping[str, int],
    progress: Progress,
) -> None:
    for done, (name, at) in enumerate(offsets.items()):
        matrices[name].write(memory[at : at + matrices[name].num_bytes])
        progress(done, len(offsets))


def _offsets(matrices: Mapping[str, Matrix]) -> tuple[dict[str, int], int]:
    """Offset of each matrix, and the size of all."""
    offsets = {}
    end = 0
    for name, matrix in matrices.items():
        offsets[name] = end
        end += -(-matrix.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _identity(folder: Path, matrices: Mapping[str, Matrix], part: str) -> str:
    source = (folder / WEIGHTS_NAME).stat()
    layouts = [(name, matrix.layout) for name, matrix in matrices.items()]
    what = (source.st_size, source.st_mtime_ns, layouts, *([part] if part else []))
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()
