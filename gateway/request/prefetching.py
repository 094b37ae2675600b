"""Tells the engine that is expected to go on with a generation to pull the prompt's blocks while
they are computed."""

from __future__ import annotations

import contextlib

from headwater.proto.engine_pb2 import Holder, PrefetchRequest

from ..router.decision import Decision
from ..stages.prefetches import Prefetches
from .generation import Generation

MIN_SECONDS = 30.0
PATIENCE = 5
"""A prefetch ends by itself after so many seconds at least, and after so many times the predicted
ones."""
MAX_BLOCKS = 1 << 16
"""Blocks of a prompt that are named to the engine; the others are pulled with the request."""
HASH_LEN = 16


def prefetching(
    prefetches: Prefetches, generation: Generation, decision: Decision
) -> contextlib.AbstractContextManager[None]:
    """Scope of an attempt that hands over; nothing for any other."""
    successor = decision.successor
    if successor is None or not generation.prepared.block_hashes:
        return contextlib.nullcontext()
    holder = Holder(
        address=decision.address, epoch=decision.member.epoch, num_tokens=decision.num_prompt_tokens
    )
    request = PrefetchRequest(
        epoch=successor.epoch,
        holder=holder,
        block_hashes=generation.prepared.block_hashes[: MAX_BLOCKS * HASH_LEN],
        cache_namespace=generation.namespace,
        tenant=generation.request.caller.tenant.key,
        chunk_blocks=(decision.max_chunk_tokens or decision.num_prompt_tokens)
        // decision.block_size,
        limit_ms=round(1000 * max(MIN_SECONDS, PATIENCE * decision.predicted_seconds)),
    )
    return prefetches.running(successor.address, request)
