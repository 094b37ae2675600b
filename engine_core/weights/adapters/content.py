"""Files of an adapter's folder and the hash of their content. Reads no tensors."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...config import ConfigError, require

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 256 << 10
DIGEST_BYTES = 16
PIECE_BYTES = 4 << 20
"""Bytes that are hashed together; pieces are hashed in parallel."""


def read_file(path: Path, max_bytes: int) -> bytes:
    """Content of a file of limited size. Raises `ConfigError` for one that is missing or too large,
    and for a pipe or a device."""
    try:
        size = path.stat().st_size
    except (OSError, ValueError):
        raise ConfigError("adapter", f"without {path.name}", f"a folder with {path.name}") from None
    require(path.is_file(), path.name, "no regular file", "a regular file")
    require(size <= max_bytes, path.name, f"{size} bytes", f"at most {max_bytes} bytes")
    try:
        return path.read_bytes()
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise ConfigError("adapter file", path.name, allowed) from None


def digest_of(*files: bytes) -> bytes:
    """Hash of files, whose pieces are hashed on several threads."""
    pieces = [
        memoryview(data)[at : at + PIECE_BYTES]
        for data in files
        for at in range(0, len(data), PIECE_BYTES)
    ]
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for data in files:
        whole.update(len(data).to_bytes(8, "little"))
    with ThreadPoolExecutor() as threads:
        for piece in threads.map(_hashed, pieces):
            whole.update(piece)
    return whole.digest()


def _hashed(piece: memoryview) -> bytes:
    return hashlib.blake2b(piece, digest_size=DIGEST_BYTES).digest()
