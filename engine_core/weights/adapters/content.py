"""Files of an adapter's folder and the hash of their content. Reads no tensors."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from ...config import ConfigError, require

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 256 << 10
DIGEST_BYTES = 16
MOST_THREADS = 8
PIECE_BYTES = 4 << 20
"""Bytes that are hashed together; pieces are hashed in parallel."""


def read_file(path: Path, max_bytes: int) -> memoryview:
    """Content of a file of limited size. Raises `ConfigError` for one that is missing or too large,
    and for a pipe or a device."""
    try:
        size = path.stat().st_size
    except (OSError, ValueError):
        raise ConfigError("adapter", f"without {path.name}", f"a folder with {path.name}") from None
    require(path.is_file(), path.name, "no regular file", "a regular file")
    require(size <= max_bytes, path.name, f"{size} bytes", f"at most {max_bytes} bytes")
    # A bytearray would be filled with zeros first, on one thread.
    content = np.empty(size, np.uint8).data
    try:
        with path.open("rb", buffering=0) as file:
            # A file that is being written has the hash of the part that was read.
            return content[: _read_pieces(file.fileno(), content)]
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise ConfigError("adapter file", path.name, allowed) from None


def _read_pieces(file: int, content: memoryview) -> int:
    """Fills memory with a file's bytes, on several threads. Returns the number of bytes up to the
    end of the first piece that is not whole."""
    places = range(0, len(content), PIECE_BYTES)

    def read(at: int) -> int:
        return os.preadv(file, [content[at : at + PIECE_BYTES]], at)

    total = 0
    with ThreadPoolExecutor(min(len(places), MOST_THREADS) or 1, "read") as threads:
        for num_bytes in threads.map(read, places):
            total += num_bytes
            if num_bytes < PIECE_BYTES:
                break
    return total


def digest_of(*files: bytes | memoryview) -> bytes:
    """Hash of files, whose pieces are hashed on several threads."""
    with Hashing(*files) as hashing:
        return hashing.digest()


class Hashing:
    """Hashes files on threads of its own, within its scope."""

    def __init__(self, *files: bytes | memoryview) -> None:
        self._sizes = [len(data) for data in files]
        self._pieces = [
            memoryview(data)[at : at + PIECE_BYTES]
            for data in files
            for at in range(0, len(data), PIECE_BYTES)
        ]
        self._threads = ThreadPoolExecutor(min(len(self._pieces), MOST_THREADS), "hash")

    def __enter__(self) -> Self:
        self._hashes = self._threads.map(_hashed, self._pieces)
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def digest(self) -> bytes:
        """Waits for the hash of all files."""
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for size in self._sizes:
            whole.update(size.to_bytes(8, "little"))
        for piece in self._hashes:
            whole.update(piece)
        return whole.digest()


def _hashed(piece: memoryview) -> bytes:
    return hashlib.blake2b(piece, digest_size=DIGEST_BYTES).digest()
