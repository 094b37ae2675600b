"""Reads the messages that a JetStream consumer has now, and no later ones."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from nats.aio.msg import Msg
from nats.js import JetStreamContext

MESSAGE_SECONDS = 10.0
"""Seconds allowed for one of several messages: a server that restarts forgets its consumers."""
LOOK_SECONDS = 0.5
"""Seconds without a message after which the server is asked whether there are more."""


async def pending_messages(
    consumer: JetStreamContext.PullSubscription, page: int
) -> AsyncGenerator[Msg, None]:
    """The messages, `page` of them at a time. Some may be deleted meanwhile. Ends the subscription.
    Raises `TimeoutError` when the next one does not come, and what NATS raises."""
    try:
        num_left = await _num_pending(consumer)
        received_at = time.monotonic()
        while num_left > 0:
            try:
                found = await consumer.fetch(min(page, num_left), timeout=LOOK_SECONDS)
            except (
                TimeoutError
            ):  # Python's own where the server was slow to say that there is nothing
                # Those that were deleted meanwhile do not come.
                num_left = min(num_left, await _num_pending(consumer))
                if num_left and time.monotonic() - received_at > MESSAGE_SECONDS:
                    raise
                continue
            num_left = num_left - len(found)
            received_at = time.monotonic()
            for message in found:
                yield message
    finally:
        await consumer.unsubscribe()


async def _num_pending(consumer: JetStreamContext.PullSubscription) -> int:
    return (await consumer.consumer_info()).num_pending or 0
