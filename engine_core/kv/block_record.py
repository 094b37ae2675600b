"""A KV block as it is stored or sent: a header that says what it is, then its bytes, under one
checksum.

Knows bytes; knows nothing about files, sockets or what is in a block.
"""

from __future__ import annotations

import struct
from hashlib import blake2b, sha256
from typing import NamedTuple

from .prefix_hash import HASH_LEN

KEY_LEN = 16
_FIELDS = struct.Struct(f"<4s{KEY_LEN}s{HASH_LEN}s{HASH_LEN}s{HASH_LEN}sQ")
_CHECKSUM_LEN = 16
_MAGIC = b"HWB1"
HEADER_LEN = _FIELDS.size + _CHECKSUM_LEN
Buffer = bytes | bytearray | memoryview


class BlockId(NamedTuple):
    """Identity of a block. Equal ids, equal bits."""

    key: bytes
    """Everything that the bits depend on beside the tokens: see `kv_key`."""
    namespace: bytes
    block_hash: bytes
    parent: bytes
    """The hash before it in its chain; empty for the first block."""


def kv_key(numerics_id: str, block_size: int, block_bytes: int, *what: object) -> bytes:
    """Equal for engines whose blocks are interchangeable. `what` is what else is in a block, by its
    `repr`."""
    words = repr((numerics_id, block_size, block_bytes, *what)).encode()
    return blake2b(words, digest_size=KEY_LEN).digest()


def header_of(block: BlockId, payload: Buffer) -> bytes:
    parent = block.parent or bytes(HASH_LEN)
    fields = _FIELDS.pack(
        _MAGIC, block.key, block.namespace, block.block_hash, parent, len(payload)
    )
    return fields + _checksum(fields, payload)


def read_header(header: Buffer) -> tuple[BlockId, int] | None:
    """Id and number of the bytes behind it; None for what is no header."""
    if len(header) != HEADER_LEN:
        return None
    magic, key, namespace, block_hash, parent, num_bytes = _FIELDS.unpack(header[: _FIELDS.size])
    if magic != _MAGIC:
        return None
    return BlockId(
        key, namespace, block_hash, b"" if parent == bytes(HASH_LEN) else parent
    ), num_bytes


def is_block(
    header: Buffer, payload: Buffer, key: bytes, namespace: bytes, block_hash: bytes
) -> bool:
    """Whether these bytes are that block's, whole and unchanged."""
    found = read_header(header)
    if found is None or found[1] != len(payload):
        return False
    block = found[0]
    return (block.key, block.namespace, block.block_hash) == (
        key,
        namespace,
        block_hash,
    ) and is_whole(header, payload)


def is_whole(header: Buffer, payload: Buffer) -> bool:
    """Whether these bytes are the ones that the header was made for, and it is unchanged."""
    return bytes(header[_FIELDS.size :]) == _checksum(header[: _FIELDS.size], payload)


def _checksum(fields: Buffer, payload: Buffer) -> bytes:
    # Twice as fast as blake2b where the processor has instructions for it (1.7 GB/s a thread,
    # 2026-11-23).
    digest = sha256(fields)
    digest.update(payload)
    return digest.digest()[:_CHECKSUM_LEN]
