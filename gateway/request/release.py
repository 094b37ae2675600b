"""How a request leaves the line before its answer's end: cancelled, or left to whoever comes for it."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

from headwater.services.runtime import errors

if TYPE_CHECKING:
    from .generation import Generation


def context_of(generation: Generation) -> bytes:
    """What another gateway needs to go on with it; empty when it cannot be resumed."""
    context = generation.job.context
    return context.encode(generation.prepared.sampling.seed) if context is not None else b""


def part(generation: Generation, reason: str) -> None:
    """Ends the streams that have not ended, or leaves them. Asked while the cause is raised."""
    if generation.job.context is None or not _is_left(generation):
        for choice in generation.choices:
            choice.cancel(reason)
        return
    session = next((each.session for each in generation.choices if each.session is not None), None)
    stream_ids = [stream_id for each in generation.choices if (stream_id := each.detach()) is not None]
    if session is not None:
        session.detach(stream_ids, generation.num_prompt_tokens, generation.num_output_tokens)


def _is_left(generation: Generation) -> bool:
    """By its client's connection or by its gateway, not by a word that ends it, nor for being late."""
    if not isinstance(sys.exc_info()[1], asyncio.CancelledError):
        return False
    deadline, word = generation.job.caller.deadline, generation.cancelled_by
    is_late = deadline is not None and time.monotonic() >= deadline
    return not is_late and (word is None or isinstance(word, errors.Unavailable))
