"""Tells in bounded time whether a grammar can be compiled, whatever it is: in processes that die of those that cannot.

Remembers what was asked before. A grammar that explodes costs its own limit, once, and nobody else's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path

from headwater.services.grammars.check import COMPILE_SECONDS
from headwater.services.grammars.grammars import GrammarError

MAX_PROCESSES = 4
MAX_REMEMBERED = 4096
_MAX_LINE = 4 << 20

Verdict = str | None
"""Why not; None for a good grammar."""


class GrammarChecker:
    """Starts its first process with the first question, another one when all are busy."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._idle: list[asyncio.subprocess.Process] = []
        self._room = asyncio.Semaphore(MAX_PROCESSES)

    async def __aenter__(self) -> GrammarChecker:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._idle:
            await _end(process)

    async def check(self, folder: Path, grammar: str) -> None:
        """Raises `GrammarError` for what the tokens of the model in this folder cannot follow, or not within limits."""
        key = blake2b(f"{folder}\0{grammar}".encode(), digest_size=16).digest()
        if key not in self._verdicts:
            self._verdicts[key] = await self._ask({"folder": str(folder), "grammar": grammar})
            if len(self._verdicts) > MAX_REMEMBERED:
                self._verdicts.popitem(last=False)
        verdict = self._verdicts[key]
        if verdict is not None:
            raise GrammarError(verdict)

    async def _ask(self, question: dict[str, str]) -> Verdict:
        async with self._process() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            if line := await process.stdout.readline():
                verdict: Verdict = json.loads(line)["error"]
                return verdict
            if await process.wait() == -signal.SIGPROF:
                return f"compiling it takes more than {COMPILE_SECONDS:g} seconds"
            return "compiling it takes too much memory"

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """One that nobody else speaks with; it is kept unless it died or its caller left before it answered."""
        async with self._room:
            process = self._idle.pop() if self._idle else await _start()
            try:
                yield process
            except BaseException:
                await _end(process)
                raise
            if process.returncode is None:
                self._idle.append(process)


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headwater.services.grammars.check"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
