"""Whether two folders hold the same converted model, without reading all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from .json_object import read_object
from .model_file import WEIGHTS_NAME
from .safetensors_file import opened

DIGEST_BYTES = 16
PAGE_BYTES = 4096
STRIDE_BYTES = 1 << 20
"""A page of each so many bytes counts, beside the first page of each tensor."""
WHOLE_BYTES = 64 << 20
"""Files up to this size count whole."""
_LENGTH_BYTES = 8
"""Bytes of the length that a safetensors file begins with."""


def config_fingerprint(folder: Path) -> str:
    """Hash of the model's shape, whatever the order and the spaces in its file."""
    config = read_object(folder / "config.json")
    return _digest(json.dumps(config, sort_keys=True).encode()).hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """Hash of names, types, shapes and places of all tensors, and of some of their bytes: of a file
    of up to `WHOLE_BYTES` of all of them. Raises `ConfigError` for a file that is damaged."""
    path = folder / WEIGHTS_NAME
    size = path.stat().st_size
    # `opened` has checked the header: a length in an unchecked one may have any value.
    with opened(path), path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        digest = _digest(str(size).encode(), file.read(length))
        if size <= WHOLE_BYTES:
            while data := file.read(STRIDE_BYTES):
                digest.update(data)
            return digest.hexdigest()
        file.seek(_LENGTH_BYTES)
        for at in _pages(json.loads(file.read(length)), _LENGTH_BYTES + length, size):
            file.seek(at)
            digest.update(file.read(PAGE_BYTES))
    return digest.hexdigest()


def _pages(head: dict[str, dict[str, list[int]]], begin: int, size: int) -> Iterator[int]:
    """Places in the file, in their order."""
    firsts = {begin + each["data_offsets"][0] for each in head.values() if "data_offsets" in each}
    yield from sorted(firsts | set(range(begin, size, STRIDE_BYTES)))


def _digest(*parts: bytes) -> hashlib.blake2b:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest
