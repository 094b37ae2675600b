"""Follows the grammar of each request that has one: reads its tokens, writes the next one's mask into the core's table.

Works in a thread beside the event loop, outside the interpreter lock, while the device computes the step that the masks
are for. One job at a time, so that a row's masks are written in the order in which its holders asked.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLExecutor, LLMatcher

from headwater.engine_core.step_output import StepOutput
from headwater.services.engine.mask_table import Int32Array
from headwater.services.engine.messages import Command, Fail, MasksFilled
from headwater.services.grammars.grammars import GrammarError, check

MAX_THREADS = 8


@dataclass(slots=True, eq=False, kw_only=True)
class Follower:
    """One answer and where its grammar stands."""

    key: int
    matcher: LLMatcher
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
        self._heard = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "masks")
        num_threads = min(MAX_THREADS, (os.cpu_count() or 1) // 2)
        # None: the thread does it, without waking another one.
        self._crew = LLExecutor(num_threads) if num_threads > 1 else None

    def follow(self, key: int, matcher: LLMatcher, output_ids: Sequence[int]) -> None:
        """From the grammar's start; `output_ids` is what a resumed answer has already."""
        self._followers[key] = Follower(key=key, matcher=matcher, unread=list(output_ids), num_outputs=len(output_ids))

    def hear(self, output: StepOutput) -> None:
        if not self._followers:
            return
        if (wanted := output.masks_wanted) is not None:
            self._seat(wanted.keys, wanted.rows, wanted.tickets)
        self._read(output)
        for finished in output.finishes:
            self._forget(finished.key)
        if self._due:
            self._heard.set()

    async def run(self) -> None:
        """For ever: writes what is due."""
        loop = asyncio.get_running_loop()
        while True:
            await self._heard.wait()
            self._heard.clear()
            start = time.perf_counter()
            jobs = [self._job(follower) for follower in self._due.values()]
            self._due.clear()
            faults = await loop.run_in_executor(self._thread, self._work, jobs)
            self._tell(jobs, faults)
            self._observe(time.perf_counter() - start)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

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
            self._holders.pop(follower.row, None)

    def _job(self, follower: Follower) -> Job:
        token_ids, follower.unread = follower.unread, []
        return Job(follower, token_ids, follower.row, follower.ticket, follower.num_outputs)

    def _work(self, jobs: list[Job]) -> list[str | None]:
        """What went wrong with each, if anything. In the thread."""
        faults = [_fault_of(job) for job in jobs]
        table, address, num_bytes = self._table, self._table.ctypes.data, self._table.strides[0]
        good = [(job.follower.matcher, job.row) for job, fault in zip(jobs, faults, strict=True) if fault is None]
        if self._crew is not None and len(good) > 1:
            self._crew.unsafe_compute_mask_ptr(good, address, num_bytes, len(table))
        else:
            for matcher, row in good:
                matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
        return [fault or _fault_of_mask(job, table) for job, fault in zip(jobs, faults, strict=True)]

    def _tell(self, jobs: list[Job], faults: list[str | None]) -> None:
        filled = [job for job, fault in zip(jobs, faults, strict=True) if fault is None]
        failed = [(job, fault) for job, fault in zip(jobs, faults, strict=True) if fault is not None]
        if filled:
            rows, tickets = [job.row for job in filled], [job.ticket for job in filled]
            self._send(MasksFilled(rows, tickets, [job.output_index for job in filled]))
        if failed:
            self._send(Fail([job.follower.key for job, _ in failed], [fault for _, fault in failed]))


def _fault_of(job: Job) -> str | None:
    matcher = job.follower.matcher
    if job.token_ids:
        matcher.consume_tokens(job.token_ids)
    return _fault(matcher)


def _fault_of_mask(job: Job, table: Int32Array) -> str | None:
    fault = _fault(job.follower.matcher)
    return fault if fault is not None or table[job.row].any() else "nothing matches the grammar from here on"


def _fault(matcher: LLMatcher) -> str | None:
    try:
        check(matcher)
    except GrammarError as error:
        return f"the grammar cannot be followed any further: {error}"
    return None
