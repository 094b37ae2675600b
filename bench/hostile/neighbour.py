"""The neighbour: a tenant that asks for short streams and for structured answers at an even pace,
however long the answers take."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..sse_client import Outcome, SseConnection

LIMIT_SECONDS = 15.0
"""Seconds after which the neighbour gives up an answer, which counts as one that took this long."""
STREAMS = 12.0
"""Streams that the neighbour asks for in a second."""
STRUCTURED = 2.0
"""Structured answers that it requests in a second."""
CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Latencies:
    """Figures of the neighbour in one stretch of time, in seconds."""

    ttft: list[float] = field(default_factory=list)
    """Times to first token of streams."""
    structured: list[float] = field(default_factory=list)
    """Times of whole structured answers."""
    faults: list[str] = field(default_factory=list)
    """Errors that the neighbour got."""


class Neighbour:
    """Client that sends requests at a fixed rate, so that a pause of the server delays each request
    in it."""

    def __init__(self, rest: str, model: str, key: str) -> None:
        self._rest = rest
        self._model = model
        self._headers = {"authorization": f"Bearer {key}"}
        self._numbers: Iterator[int] = itertools.count()

    async def ask_for(self, seconds: float) -> Latencies:
        """Asks for so many seconds, and waits for the answers."""
        seen = Latencies()
        async with asyncio.TaskGroup() as group:
            group.create_task(_at_pace(STREAMS, seconds, lambda: self._stream(seen)))
            group.create_task(_at_pace(STRUCTURED, seconds, lambda: self._structured(seen)))
        return seen

    async def ask_once(self) -> Latencies:
        """Requests one stream and one structured answer."""
        seen = Latencies()
        await asyncio.gather(self._stream(seen), self._structured(seen))
        return seen

    async def _stream(self, seen: Latencies) -> None:
        body = self._chat() | {"max_tokens": 2, "ignore_eos": True}
        outcome = await self._call(body, seen.faults)
        seen.ttft.append(LIMIT_SECONDS if outcome is None else outcome.ttft)

    async def _structured(self, seen: Latencies) -> None:
        """Requests a small object under a schema that is different each time, so that no compiled
        grammar is reused."""
        name = f"city{next(self._numbers)}"
        schema = {
            "type": "object",
            "properties": {name: {"enum": ["Rome", "Oslo"]}, "visited": {"type": "boolean"}},
            "required": [name, "visited"],
            "additionalProperties": False,
        }
        form = {"json": schema, "disable_any_whitespace": True}
        body = self._chat() | {"max_tokens": 32, "temperature": 0, "structured_outputs": form}
        outcome = await self._call(body, seen.faults)
        seen.structured.append(LIMIT_SECONDS if outcome is None else outcome.e2e)

    async def _call(self, body: dict[str, Any], faults: list[str]) -> Outcome | None:
        """Outcome of a request on a connection of its own; None for an error, which is added to
        `faults`: a fast error is no fast answer."""
        connection = None
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                connection = await SseConnection.open(self._rest)
                outcome = await connection.call(CHAT, body, self._headers)
        except (TimeoutError, OSError) as fault:
            faults.append(type(fault).__name__)
            return None
        finally:
            if connection is not None:
                connection.close()
        if outcome.error:
            faults.append(outcome.error)
            return None
        return outcome

    def _chat(self) -> dict[str, Any]:
        question = f"Question {next(self._numbers)}: where did you go?"
        return {"model": self._model, "messages": [{"role": "user", "content": question}]}


async def _at_pace(
    per_second: float, seconds: float, ask: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Asks so often in a second, whether or not earlier answers have come."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds * per_second)):
            await asyncio.sleep(began + number / per_second - loop.time())
            group.create_task(ask())
