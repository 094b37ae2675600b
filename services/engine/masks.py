"""Follows the grammar of each request that has one: reads its tokens, writes the next one's mask into the core's table.

Works in a thread beside the event loop, outside the interpreter lock, while the device computes the step that the masks
are for. One job at a time, so that a row's masks are written in the order in which its holders asked.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from headwater.engine_core.step_output import StepOutput
from headwater.services.engine.mask_table import Int32Array
from headwater.services.engine.messages import Command, Fail, MasksFilled
from headwater.services.grammars.grammars import GrammarError, check

MAX_THREADS = 8
SWITCH_SECONDS = 0.0002
"""After which the interpreter passes from one thread to another that waits for it."""


def num_mask_threads() -> int:
    """That write masks at the same time."""
    return max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))


@dataclass(slots=True, eq=False)
class Family:
    """Copies of one compiled grammar: only one of them can be advanced at a time."""

    root: LLMatcher
    seconds: float
    """That it took to compile."""
    num_members: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Follower:
    """One answer and where its grammar stands."""

    key: int
    matcher: LLMatcher
    family: Family
    unread: list[int]
    num_outputs: int
    """Tokens of the answer, those unread included."""
    row: int = -1
    """Of the mask table; -1 while it has none."""
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A mask to write, after tokens to read."""

    follower: Follower
    token_ids: list[int]
    row: int
    ticket: int
    output_index: int


class MaskWriter:
    """`table` is the core's; `send` takes what the core shall hear; `observe` the seconds from hearing to sending."""

    def __init__(self, table: Int32Array, send: Callable[[Command], None], observe: Callable[[float], None]) -> None:
        self._table, self._send, self._observe = table, send, observe
        self._followers: dict[int, Follower] = {}
        self._holders: dict[int, Follower] = {}
        """By row."""
        self._due: dict[int, Follower] = {}
        """By key: those whose next mask can be written."""
        self._is_at_work = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thread = ThreadPoolExecutor(1, "masks")
        num_threads = num_mask_threads()
        # None: the thread does it, without waking another one.
        self._crew = LLExecutor(num_threads) if num_threads > 1 else None

    def follow(self, key: int, matcher: LLMatcher, family: Family, output_ids: Sequence[int]) -> None:
        """From the grammar's start; `output_ids` is what a resumed answer has already."""
        self._followers[key] = Follower(
            key=key, matcher=matcher, family=family, unread=list(output_ids), num_outputs=len(output_ids)
        )

    def hear(self, output: StepOutput) -> None:
        if not self._followers:
            return
        if (wanted := output.masks_wanted) is not None:
            self._seat(wanted.keys, wanted.rows, wanted.tickets)
        self._read(output)
        for finished in output.finishes:
            self._forget(finished.key)
        self._begin()

    async def run(self) -> None:
        """Until writing fails, which is for whoever waits here; else for ever."""
        before = sys.getswitchinterval()
        # The thread shall not wait for the loop to be done with a step's other news: the device waits for the thread.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            await self._failed
        finally:
            sys.setswitchinterval(before)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Has the thread write what is due, unless it is at work."""
        if self._is_at_work or not self._due:
            return
        # Of the crew each thread takes a stretch of them: those who would wait for one another shall be in one.
        due = sorted(self._due.values(), key=lambda follower: id(follower.family))
        self._due.clear()
        self._is_at_work = True
        working = functools.partial(self._ended, time.perf_counter(), jobs := [self._job(each) for each in due])
        asyncio.get_running_loop().run_in_executor(self._thread, self._work, jobs).add_done_callback(working)

    def _ended(self, start: float, jobs: list[Job], done: asyncio.Future[list[str | None]]) -> None:
        self._is_at_work = False
        if done.cancelled():
            return
        if (fault := done.exception()) is not None:
            if not self._failed.done():
                self._failed.set_exception(fault)
            return
        self._tell(jobs, done.result())
        self._observe(time.perf_counter() - start)
        self._begin()

    def _seat(self, keys: list[int], rows: list[int], tickets: list[int]) -> None:
        for key, row, ticket in zip(keys, rows, tickets, strict=True):
            if (follower := self._followers.get(key)) is None:
                continue
            # Whoever had the row waits for another one; the row that the follower had is another's, or will be.
            if (before := self._holders.pop(row, None)) is not None:
                before.row = -1
                self._due.pop(before.key, None)
            self._holders.pop(follower.row, None)
            follower.row, follower.ticket = row, ticket
            self._holders[row] = self._due[key] = follower

    def _read(self, output: StepOutput) -> None:
        start = 0
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            if (follower := self._followers.get(key)) is not None:
                follower.unread += output.token_ids[start : start + count]
                follower.num_outputs += count
                if follower.row >= 0:
                    self._due[key] = follower
            start += count

    def _forget(self, key: int) -> None:
        self._due.pop(key, None)
        if (follower := self._followers.pop(key, None)) is not None:
            follower.family.num_members -= 1
            self._holders.pop(follower.row, None)

    def _job(self, follower: Follower) -> Job:
        token_ids, follower.unread = follower.unread, []
        return Job(follower, token_ids, follower.row, follower.ticket, follower.num_outputs)

    def _work(self, jobs: list[Job]) -> list[str | None]:
        """What went wrong with each, if anything. In the thread."""
        self._consume(jobs)
        table, address, num_bytes = self._table, self._table.ctypes.data, self._table.strides[0]
        good = [(job.follower.matcher, job.row) for job in jobs if not job.follower.matcher.is_error()]
        if self._crew is not None and len(good) > 1:
            self._crew.unsafe_compute_mask_ptr(good, address, num_bytes, len(table))
        else:
            for matcher, row in good:
                matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
        allows_any: list[bool] = np.any(table[[job.row for job in jobs]], axis=1).tolist()
        return [_fault(job.follower.matcher, allows) for job, allows in zip(jobs, allows_any, strict=True)]

    def _consume(self, jobs: list[Job]) -> None:
        """A token that the grammar does not take leaves an error in the matcher."""
        single = [(job.follower.matcher, job.token_ids[0]) for job in jobs if len(job.token_ids) == 1]
        if self._crew is not None and len(single) > 1:
            self._crew.consume_token_par(single)
        else:
            for matcher, token_id in single:
                matcher.consume_token(token_id)
        for job in jobs:
            if len(job.token_ids) > 1:
                job.follower.matcher.consume_tokens(job.token_ids)

    def _tell(self, jobs: list[Job], faults: list[str | None]) -> None:
        filled = [job for job, fault in zip(jobs, faults, strict=True) if fault is None]
        failed = [(job, fault) for job, fault in zip(jobs, faults, strict=True) if fault is not None]
        if filled:
            rows, tickets = [job.row for job in filled], [job.ticket for job in filled]
            self._send(MasksFilled(rows, tickets, [job.output_index for job in filled]))
        if failed:
            self._send(Fail([job.follower.key for job, _ in failed], [fault for _, fault in failed]))


def _fault(matcher: LLMatcher, allows_any: bool) -> str | None:
    try:
        check(matcher)
    except GrammarError as error:
        return f"the grammar cannot be followed any further: {error}"
    return None if allows_any else "nothing matches the grammar from here on"
