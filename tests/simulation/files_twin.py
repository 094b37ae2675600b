"""`BlockFiles` in memory, with faults: what a disk may do to a file, and a disk that is full or
cannot be read."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path

from headwater.engine_core.kv.block_record import HEADER_LEN, BlockId, BlockSeal
from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.disk.block_files import BlockFiles

KEY = b"k" * 16
OTHER_KEY = b"o" * 16
SEAL = BlockSeal()
FAULTS = ("lost", "truncated", "torn", "another block's", "another key's", "doubled")


class FilesTwin(BlockFiles):
    """Files as bytes by namespace and hash. What is read is verified by the same code as real
    files."""

    def __init__(self, max_files: int, rng: random.Random, fault_chance: float = 0.0) -> None:
        """`fault_chance`: of a file, to be spoiled before it is read."""
        self.folder = Path("/nowhere")
        self.key = KEY
        self.max_bytes = max_files
        self.num_faults = 0
        self.is_full = self.is_broken = False
        self._rng = rng
        self._fault_chance = fault_chance
        self._files: dict[tuple[bytes, bytes], bytes] = {}

    @staticmethod
    def file_bytes(block_bytes: int) -> int:
        return 1

    def write(self, owner: Owner, block_hash: bytes, parent: bytes, payload: memoryview) -> bool:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        block = BlockId(KEY, owner.namespace, block_hash, parent)
        self._files[owner.namespace, block_hash] = SEAL.header_of(block, payload) + bytes(payload)
        return True

    def read(self, namespace: bytes, block_hash: bytes, into: memoryview) -> bool:
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error")
        if (namespace, block_hash) in self._files and self._rng.random() < self._fault_chance:
            self._spoil((namespace, block_hash))
        data = self._files.get((namespace, block_hash))
        if data is None:
            return False
        payload = data[HEADER_LEN:]
        # As much as there is arrives, whatever it is.
        into[: len(payload)] = payload[: len(into)]
        if len(payload) != len(into):
            return False
        return SEAL.is_block(data[:HEADER_LEN], into, KEY, namespace, block_hash)

    def drop(self, namespace: bytes, block_hash: bytes) -> None:
        self._files.pop((namespace, block_hash), None)

    def touch(self, namespace: bytes, block_hash: bytes) -> None: ...

    def scan(self) -> Iterator[BlockId]:
        for data in self._files.values():
            if (found := SEAL.read_header(data[:HEADER_LEN])) is not None and found[0].key == KEY:
                yield found[0]

    def measure(self, block_bytes: int) -> float:
        return 0.0

    def close(self) -> None: ...

    def spoil(self) -> None:
        """Does something to one file."""
        if self._files:
            self._spoil(self._rng.choice(list(self._files)))

    def _spoil(self, place: tuple[bytes, bytes]) -> None:
        self.num_faults += 1
        data = bytearray(self._files[place])
        other = self._files[self._rng.choice(list(self._files))]
        match self._rng.choice(FAULTS):
            case "lost":
                del self._files[place]
            case "truncated":
                self._files[place] = bytes(data[: self._rng.randrange(len(data) + 1)])
            case "torn":
                start = self._rng.randrange(len(data) // 2, len(data) + 1)
                self._files[place] = bytes(data[:start] + bytes(len(data) - start))
            case "another block's":
                self._files[place] = other
            case "another key's":
                block, _ = SEAL.read_header(data[:HEADER_LEN]) or (None, 0)
                if block is not None:
                    payload = bytes(byte ^ 85 for byte in data[HEADER_LEN:])
                    header = SEAL.header_of(block._replace(key=OTHER_KEY), payload)
                    self._files[place] = header + payload
            case _:
                namespace, block_hash = place
                self._files[namespace, self._rng.randbytes(16)] = bytes(data)
                self._files[self._rng.randbytes(16), block_hash] = bytes(data)
