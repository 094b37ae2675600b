"""Notices that a client disconnects while its answer is computed. Knows nothing about answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Departure:
    """Calls `on_left` when the client disconnects, until it is stopped.

    NOTE: without a task. A server's `receive` waits for one future, mostly as long as the answer takes, which goes on
    with it when it is done; to create a task, cancel it and wait for its end costs more than three times as much.
    """

    def __init__(self, receive: Receive, on_left: Callable[[], None]) -> None:
        self._listening = _listen(receive, on_left)
        self._is_stopped = False
        asyncio.get_running_loop().call_soon(self._go_on)

    def stop(self) -> None:
        self._is_stopped = True
        # Its future goes with it: nothing else holds that.
        self._listening.close()

    def _go_on(self, _: object = None) -> None:
        if self._is_stopped:
            return
        try:
            waits_for = self._listening.send(None)
        except StopIteration:
            return
        if waits_for is None:
            # It yields to other tasks.
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            waits_for.add_done_callback(self._go_on)


async def _listen(receive: Receive, on_left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_left()
