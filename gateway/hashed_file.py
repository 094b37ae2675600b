"""A file whose bytes are hashed on their way to or from JetStream's object store."""

from __future__ import annotations

import hashlib
from typing import IO


class HashedFile:
    """A file that the object store reads from or writes into, in a thread."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """Digest of the bytes that went through."""
        return self._hash.hexdigest()

    def readinto(self, buffer: bytearray) -> int:
        piece = self._file.read(len(buffer))
        self._hash.update(piece)
        buffer[: len(piece)] = piece
        return len(piece)

    def write(self, piece: bytes) -> int:
        self._hash.update(piece)
        return self._file.write(piece)
