"""Bounds the number of choices of one request that run at once."""

from __future__ import annotations

import asyncio
import sys

NO_BOUND = sys.maxsize


class Entrance:
    """Entrance of one request's prompts to the gateway's queue: one prompt enters at a time, and at
    most `most` choices of the request run at once."""

    def __init__(self, most: int = NO_BOUND, num_prompts: int = 1) -> None:
        self.most = most
        self._num_inside = 0
        self._door = asyncio.Lock() if num_prompts > 1 else None
        """Lock of the prompt that enters; None where the request has one prompt."""
        self._room: asyncio.Future[None] | None = None
        """Pending while the entering prompt waits for others to leave."""

    async def enter(self, num_choices: int) -> None:
        """Returns when `num_choices` that begin together may go to the queue. Call `let_next` when
        they are past it, and `left` when they have ended."""
        if self._door is not None:
            await self._door.acquire()
        try:
            while not self.has_room(num_choices):
                self._room = asyncio.get_running_loop().create_future()
                await self._room
        except BaseException:
            self.let_next()
            raise
        self._num_inside += num_choices

    def let_next(self) -> None:
        """Lets the next prompt enter."""
        if self._door is not None:
            # In the next pass of the event loop: a thousand prompts in one pass would hold up all
            # other requests.
            asyncio.get_running_loop().call_soon(self._door.release)

    def come_along(self) -> None:
        """Counts one more choice of the prompt that has entered."""
        self._num_inside += 1

    def has_room(self, num_choices: int) -> bool:
        return not self._num_inside or self._num_inside + num_choices <= self.most

    def left(self, num_choices: int) -> None:
        """Counts `num_choices` that have ended."""
        self._num_inside -= num_choices
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
