"""Releases a generation's streams before its answer's end: cancels them, or keeps them for the
client that resumes it."""

from __future__ import annotations

import asyncio
import sys
import time

from headwater.services.runtime import errors

from .generation import Generation


def release(generation: Generation, reason: str) -> None:
    """Ends the streams that are open, or detaches from them. Called while the cause is raised."""
    if generation.request.context is None or not _is_left(generation):
        for choice in generation.choices:
            choice.cancel(reason)
        return
    streams = [choice.stream for choice in generation.choices if choice.stream is not None]
    for choice in generation.choices:
        choice.stream = None
    if streams:
        stream_ids = [stream.stream_id for stream in streams]
        streams[0].session.detach(
            stream_ids, generation.num_prompt_tokens, generation.num_output_tokens
        )


def _is_left(generation: Generation) -> bool:
    """Whether the streams go on: the client's connection or this gateway ends, and the request was
    neither cancelled nor is late."""
    if not isinstance(sys.exc_info()[1], asyncio.CancelledError):
        return False
    deadline = generation.request.caller.deadline
    cause = generation.cancelled_by
    is_late = deadline is not None and time.monotonic() >= deadline
    return not is_late and (cause is None or isinstance(cause, errors.Unavailable))
