"""Calls storage again while it may be restarting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headwater.services.runtime.errors import Unavailable

from ..buckets import FAILURES

PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0)
"""Seconds between two calls, in which storage may come back."""
ReplyT = TypeVar("ReplyT")


async def retry(call: Callable[[], Awaitable[ReplyT]]) -> ReplyT:
    """Returns or raises what the last call does. Earlier storage failures are tried again."""
    for pause in PAUSES:
        try:
            return await call()
        except (*FAILURES, Unavailable):
            await asyncio.sleep(pause)
    return await call()
