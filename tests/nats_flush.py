"""A client's messages, known to have arrived."""

from __future__ import annotations

from nats.aio.client import Client


async def flush(client: Client) -> None:
    """Returns when the server has all that was sent, subscriptions included.

    NOTE: the client's ping overtakes what waits to be written; the second one does not.
    """
    for _ in range(2):
        await client.flush()
