"""Finds out in bounded time whether a grammar can be compiled, in forks that die of grammars that
cannot.

Remembers verdicts within a cache namespace: no tenant learns from the time of a grammar whether
others use it. Tenants share the forks fairly. The wait for one is no part of a grammar's limit.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from headwater.engine_core.system.usable_cores import usable_cores

from ..runtime.errors import Unavailable
from ..runtime.fair_queue import QueueLimits
from ..runtime.fair_threads import FairThreads
from ..runtime.tenant_cache import TenantCache
from .asker import Asker
from .check import TOO_LARGE
from .check_process import CheckDied, Checked, CheckProcess, Question, Verdict
from .grammars import GrammarError

MAX_CHECKS = 4
"""Most checks at once. One place is reserved for tenants that have no check running."""
LIMITS = QueueLimits(num_waiting=256, num_bytes=16 << 20, wait_seconds=10.0)
MAX_REMEMBERED_BYTES = 2 << 20
VERDICT_BYTES = 256
"""Bytes of a remembered verdict without its reason."""
FREE_TEXT = "start: /(.|\\n)*/"
"""A grammar that every tokenizer can follow."""
START_PAUSES = (0.1, 0.5, 0.0)
"""Seconds to wait after each start that fails, as many as are tried."""


def num_checks() -> int:
    """Checks at once: as many as there are cores, so that on a small machine the slow checks of a
    tenant leave time to steps and to the text of answers; at least 3, of which one is reserved, so
    that a slow check does not hold up the others of its tenant."""
    return max(3, min(MAX_CHECKS, usable_cores()))


@dataclass(slots=True)
class _Asked:
    """A check under way, with the number of callers that wait for it."""

    number: int
    """Number of its question."""
    answer: asyncio.Task[Checked]
    num_waiting: int = 0


class GrammarChecker:
    """Checker of one stage. The first check starts its process, which has read the tokenizer for
    all later ones: no tenant waits for a start because another one has checks under way."""

    def __init__(self) -> None:
        self._remembered: TenantCache[bytes, Verdict] = TenantCache(MAX_REMEMBERED_BYTES)
        self._asked: dict[bytes, _Asked] = {}
        self._process = _Process()
        self._numbers = itertools.count()
        self._threads = FairThreads("a check of its grammar", num_checks(), LIMITS)

    async def __aenter__(self) -> GrammarChecker:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.close()
        await asyncio.to_thread(self._threads.close, wait=True)

    async def warm(self, folder: Path) -> None:
        """Starts the process and has it read a model's tokenizer, so that no request waits for
        either. A failure is logged; requests that need the checker get their own error."""
        question = Question(
            number=next(self._numbers), folder=str(folder), grammar=FREE_TEXT, is_slow=False
        )
        try:
            await asyncio.to_thread(self._process.check, question)
        except (CheckDied, Unavailable) as fault:
            structlog.get_logger().warning("the grammar checker is not warm", problem=str(fault))

    async def check(self, folder: Path, grammar: str, asker: Asker) -> None:
        """Checks a grammar. Raises `GrammarError` for one that the tokens of the model in this
        folder cannot follow, or not within limits; `Unavailable` when it cannot be found out, or
        not soon; `LimitExceeded` when too many grammars of the tenant wait."""
        key = asker.key_of(str(folder).encode(), grammar.encode())
        if key in self._remembered:
            verdict = self._remembered[key]
        else:
            question = Question(
                number=next(self._numbers),
                folder=str(folder),
                grammar=grammar,
                is_slow=self._threads.has_had_much(asker.tenant),
            )
            verdict = await self._answer(key, asker.tenant, question)
            num_bytes = VERDICT_BYTES + len(verdict or "")
            self._remembered.put(asker.tenant, key, verdict, num_bytes)
        if verdict is not None:
            raise GrammarError(verdict)

    async def _answer(self, key: bytes, tenant: str, question: Question) -> Verdict:
        """Verdict of one check for all waiting callers; it is cancelled when all of them have
        left."""
        asked = self._asked.get(key)
        if asked is None:
            work = functools.partial(_judged, self._process, question)
            checking = self._threads.run(
                tenant,
                len(question["grammar"]),
                work,
                computed=lambda checked: checked.computed_seconds,
            )
            asked = self._asked[key] = _Asked(question["number"], asyncio.create_task(checking))
        asked.num_waiting += 1
        try:
            return (await asyncio.shield(asked.answer)).verdict
        finally:
            asked.num_waiting -= 1
            if not asked.num_waiting:
                del self._asked[key]
                if asked.answer.cancel():
                    # In a thread: the process may be reading a tokenizer.
                    await asyncio.to_thread(self._process.give_up, asked.number)


class _Process:
    """The process that checks grammars, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while the process starts, so that only one does."""
        self._process: CheckProcess | None = None
        self._is_closed = False

    def check(self, question: Question) -> Checked:
        """Checks a grammar. Raises `CheckDied`, `Unavailable`."""
        with self._lock:
            process = self._running()
        return process.check(question)

    def give_up(self, number: int) -> None:
        """Ends a check whose verdict is not wanted any more: its place is free for others."""
        with self._lock:
            if self._process is not None:
                self._process.give_up(number)

    def close(self) -> None:
        """Ends the process; waiting callers get `CheckDied`."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.end()

    def _running(self) -> CheckProcess:
        if self._is_closed:
            raise _out_of_reach()
        if self._process is not None:
            if self._process.is_alive:
                return self._process
            self._process.end()
        self._process = self._started()
        return self._process

    def _started(self) -> CheckProcess:
        for pause in START_PAUSES:
            try:
                return CheckProcess()
            except OSError as fault:
                structlog.get_logger().warning("grammar checker did not start", fault=str(fault))
                time.sleep(pause)
        raise _out_of_reach()


def _judged(process: _Process, question: Question) -> Checked:
    """Verdict on a grammar. A death counts against it only when a second process dies of it too,
    and of memory: the first process may have been killed."""
    try:
        return process.check(question)
    except CheckDied as death:
        structlog.get_logger().warning("grammar checker died", returncode=death.returncode)
        before = death.computed_seconds
    try:
        verdict, seconds = process.check(question)
        return Checked(verdict, before + seconds)
    except CheckDied as death:
        structlog.get_logger().warning("grammar checker died again", returncode=death.returncode)
        if death.is_of_memory:
            return Checked(TOO_LARGE, before + death.computed_seconds)
        raise _out_of_reach() from death


def _out_of_reach() -> Unavailable:
    return Unavailable(
        "whether the grammar can be followed cannot be found out now",
        code="grammar_checker_unavailable",
    )
