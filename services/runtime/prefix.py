"""The chained hashes of KV blocks, for stages that see nothing else of the engine core."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.engine_core.kv.prefix_hash import Front, block_hashes


def prefix_of(
    namespace: bytes,
    token_ids: Sequence[int],
    block_size: int,
    front: tuple[bytes, int] = (b"", 0),
) -> bytes:
    """Hashes of the full blocks of `token_ids`, 16 bytes each, one after another. `front`:
    namespace and number of the leading blocks that several tenants share; 0: none."""
    shared = Front(*front) if front[1] else None
    return b"".join(block_hashes(namespace, token_ids, block_size, shared))
