"""Finds out in bounded time whether a grammar can be compiled, in processes that die of grammars
that cannot.

Remembers verdicts within a cache namespace: no tenant learns from the time of a grammar whether
others use it. Tenants share the processes fairly. The wait for one is no part of a grammar's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from ..runtime.errors import Unavailable
from ..runtime.fair_queue import QueueLimits
from ..runtime.fair_threads import FairThreads
from ..runtime.tenant_cache import TenantCache
from .asker import Asker
from .check import TOO_LARGE
from .check_process import CheckDied, CheckProcess, Verdict
from .grammars import GrammarError

MAX_PROCESSES = 4
"""One of them is for a tenant that has none."""
LIMITS = QueueLimits(num_waiting=256, num_bytes=16 << 20, wait_seconds=10.0)
MAX_REMEMBERED_BYTES = 2 << 20
VERDICT_BYTES = 256
"""Bytes of a remembered verdict without its reason."""
ANYTHING = '{"grammars": [{"lark_grammar": "start: /a/"}]}'
START_PAUSES = (0.1, 0.5)
"""Seconds before a start that failed is tried again."""


@dataclass(slots=True)
class _Asked:
    """A check under way, with the number of callers that wait for it."""

    answer: asyncio.Task[Verdict]
    num_waiting: int = 0


class GrammarChecker:
    """Checker of one stage. The first check starts the first process; another one starts when all
    are busy."""

    def __init__(self) -> None:
        self._remembered: TenantCache[bytes, Verdict] = TenantCache(MAX_REMEMBERED_BYTES)
        self._asked: dict[bytes, _Asked] = {}
        self._processes = _Processes()
        self._threads = FairThreads("a check of its grammar", MAX_PROCESSES, LIMITS)

    async def __aenter__(self) -> GrammarChecker:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._processes.close()
        await asyncio.to_thread(self._threads.close, wait=True)

    async def check(self, folder: Path, grammar: str, asker: Asker) -> None:
        """Checks a grammar. Raises `GrammarError` for one that the tokens of the model in this
        folder cannot follow, or not within limits; `Unavailable` when it cannot be found out, or
        not soon; `LimitExceeded` when too many grammars of the tenant wait."""
        key = asker.key_of(str(folder).encode(), grammar.encode())
        if key in self._remembered:
            verdict = self._remembered[key]
        else:
            work = functools.partial(
                _judged, self._processes, {"folder": str(folder), "grammar": grammar}
            )
            verdict = await self._answer(key, asker.tenant, len(grammar), work)
            num_bytes = VERDICT_BYTES + len(verdict or "")
            self._remembered.put(asker.tenant, key, verdict, num_bytes)
        if verdict is not None:
            raise GrammarError(verdict)

    async def _answer(
        self, key: bytes, tenant: str, num_bytes: int, work: Callable[[], Verdict]
    ) -> Verdict:
        """Verdict of one check for all waiting callers; it is cancelled when all of them have
        left."""
        asked = self._asked.get(key)
        if asked is None:
            answer = asyncio.create_task(self._threads.run(tenant, num_bytes, work))
            asked = self._asked[key] = _Asked(answer)
        asked.num_waiting += 1
        try:
            return await asyncio.shield(asked.answer)
        finally:
            asked.num_waiting -= 1
            if not asked.num_waiting:
                del self._asked[key]
                asked.answer.cancel()


class _Processes:
    """Pool of processes: a thread takes one, checks a grammar, and gives it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[CheckProcess] = []
        self._busy: set[CheckProcess] = set()
        self._spares = ThreadPoolExecutor(1, "spare")
        self._is_closed = False

    def check(self, question: dict[str, str]) -> Verdict:
        """Checks a grammar in an idle or a new process. Raises `CheckDied`, `Unavailable`."""
        process = self._take() or self._start()
        self._keep_spare(question)
        return self._checked(process, question)

    def _keep_spare(self, question: dict[str, str]) -> None:
        """While several grammars are checked, a process is ready for another tenant."""
        with self._lock:
            if self._needs_spare():
                self._spares.submit(self._start_spare, question)

    def _start_spare(self, question: dict[str, str]) -> None:
        with self._lock:
            is_needed = self._needs_spare()
        if is_needed:
            # It has read the tokenizer when a grammar comes.
            with contextlib.suppress(CheckDied, Unavailable):
                self._checked(self._start(), question | {"grammar": ANYTHING})

    def _needs_spare(self) -> bool:
        return not self._idle and 1 < len(self._busy) < MAX_PROCESSES and not self._is_closed

    def _checked(self, process: CheckProcess, question: dict[str, str]) -> Verdict:
        try:
            return process.check(question)
        finally:
            self._give_back(process)

    def close(self) -> None:
        """Ends all processes; waiting callers get `CheckDied`."""
        with self._lock:
            self._is_closed = True
            self._spares.shutdown(wait=False, cancel_futures=True)
            for process in self._busy:
                process.kill()
            for process in self._idle:
                process.end()

    def _take(self) -> CheckProcess | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    self._busy.add(process)
                    return process
                process.end()
        return None

    def _give_back(self, process: CheckProcess) -> None:
        with self._lock:
            self._busy.remove(process)
            if process.is_alive and not self._is_closed:
                self._idle.append(process)
            else:
                process.end()

    def _start(self) -> CheckProcess:
        for pause in (*START_PAUSES, None):
            try:
                with self._lock:
                    if self._is_closed:
                        break
                    self._busy.add(process := CheckProcess())
            except OSError as fault:
                structlog.get_logger().warning("grammar checker did not start", fault=str(fault))
                if pause is not None:
                    time.sleep(pause)
            else:
                return process
        raise _out_of_reach()


def _judged(processes: _Processes, question: dict[str, str]) -> Verdict:
    """Verdict on a grammar. A death counts against it only when a second process dies of it too,
    and of memory: the first process may have been killed."""
    try:
        return processes.check(question)
    except CheckDied as death:
        structlog.get_logger().warning("grammar checker died", returncode=death.returncode)
    try:
        return processes.check(question)
    except CheckDied as death:
        structlog.get_logger().warning("grammar checker died again", returncode=death.returncode)
        if death.is_of_memory:
            return TOO_LARGE
        raise _out_of_reach() from death


def _out_of_reach() -> Unavailable:
    return Unavailable(
        "whether the grammar can be followed cannot be found out now",
        code="grammar_checker_unavailable",
    )
