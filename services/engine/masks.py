"""Follows the grammar of each request that has one: reads its tokens, writes the next one's mask into the core's table.

Works in a thread that the core tells itself what it drew: the event loop is on neither way. Masks are computed outside
the interpreter lock, while the device computes the step that they are for; one report after another, so that a row's
masks are written in the order in which its holders asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from headwater.engine_core.step_output import MasksWanted, StepOutput
from headwater.services.engine.mask_table import Int32Array
from headwater.services.engine.messages import Command, Fail, MasksFilled, decode_step
from headwater.services.engine.ring import PeerGone, RingReader
from headwater.services.grammars.grammars import GrammarError, check

MAX_THREADS = 8
SWITCH_SECONDS = 0.00005
"""After which the interpreter passes from one thread to another that waits for it."""
FIRST_WORDS = 64
"""Of a mask, that are looked at first: single bytes have low ids in most vocabularies, and where anything is allowed,
so is its first byte."""


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


class MaskWriter:
    """`table` is the core's; `send` takes what the core shall hear, from the thread; `observe` the seconds from hearing
    to sending. Requests come and go on the event loop."""

    def __init__(self, table: Int32Array, send: Callable[[Command], None], observe: Callable[[float], None]) -> None:
        self._table, self._send, self._observe = table, send, observe
        self._followers: dict[int, Follower] = {}
        self._holders: dict[int, Follower] = {}
        """By row."""
        self._thread = ThreadPoolExecutor(1, "masks")
        num_threads = num_mask_threads()
        # None: the thread does it, without waking another one.
        self._crew = LLExecutor(num_threads) if num_threads > 1 else None

    def follow(self, key: int, matcher: LLMatcher, family: Family, output_ids: Sequence[int]) -> None:
        """From the grammar's start, before the core knows of the request; `output_ids` is what a resumed answer has
        already."""
        self._followers[key] = Follower(
            key=key, matcher=matcher, family=family, unread=list(output_ids), num_outputs=len(output_ids)
        )

    def forget(self, key: int) -> None:
        """The request has ended, if it was followed at all."""
        if (follower := self._followers.pop(key, None)) is not None:
            follower.family.num_members -= 1

    async def run(self, reports: RingReader) -> None:
        """Until writing fails, which is for whoever waits here; else for ever. The thread ends with the core, which
        does not wait for it either way."""
        before = sys.getswitchinterval()
        # The thread shall not wait for the loop to be done with a step's other news: the device waits for the thread.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._read_along, reports)
            await asyncio.Event().wait()
        finally:
            self._thread.submit(_read_away, reports)
            sys.setswitchinterval(before)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _read_along(self, reports: RingReader) -> None:
        with contextlib.suppress(PeerGone):
            while True:
                reports.wait()
                self.hear(*(decode_step(message).output for message in reports.read()))

    def hear(self, *outputs: StepOutput) -> None:
        """Writes the masks that can be written now, and says so. In one thread at a time."""
        start, due = time.perf_counter(), dict[int, Follower]()
        for output in outputs:
            if (wanted := output.masks_wanted) is not None:
                self._seat(wanted, due)
            if output.is_drawn:
                self._read(output, due)
            for finished in output.finishes:
                due.pop(finished.key, None)
        if due:
            # Of the crew each thread takes a stretch of them: those who would wait for one another shall be in one.
            followers = sorted(due.values(), key=lambda follower: id(follower.family))
            self._consume(followers)
            self._tell(followers, self._fill(followers))
            self._observe(time.perf_counter() - start)

    def _seat(self, wanted: MasksWanted, due: dict[int, Follower]) -> None:
        for key, row, ticket in zip(wanted.keys, wanted.rows, wanted.tickets, strict=True):
            if (follower := self._followers.get(key)) is None:
                continue
            # Whoever had the row waits for another one; the row that the follower had is another's, or will be.
            if (before := self._holders.pop(row, None)) is not None:
                before.row = -1
                due.pop(before.key, None)
            self._holders.pop(follower.row, None)
            follower.row, follower.ticket = row, ticket
            self._holders[row] = due[key] = follower

    def _read(self, output: StepOutput, due: dict[int, Follower]) -> None:
        for key, token_id in zip(output.keys, output.token_ids, strict=True):
            if (follower := self._followers.get(key)) is not None:
                follower.unread.append(token_id)
                follower.num_outputs += 1
                if follower.row >= 0:
                    due[key] = follower

    def _consume(self, followers: list[Follower]) -> None:
        """A token that the grammar does not take leaves an error in the matcher."""
        single = [(each.matcher, each.unread.pop()) for each in followers if len(each.unread) == 1]
        if self._crew is not None and len(single) > 1:
            self._crew.consume_token_par(single)
        else:
            for matcher, token_id in single:
                matcher.consume_token(token_id)
        for each in followers:
            if each.unread:
                each.matcher.consume_tokens(each.unread)
                each.unread.clear()

    def _fill(self, followers: list[Follower]) -> list[str | None]:
        """What went wrong with each, if anything."""
        table, address, num_bytes = self._table, self._table.ctypes.data, self._table.strides[0]
        good = [(each.matcher, each.row) for each in followers if not each.matcher.is_error()]
        if self._crew is not None and len(good) > 1:
            self._crew.unsafe_compute_mask_ptr(good, address, num_bytes, len(table))
        else:
            for matcher, row in good:
                matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
        allows_any: list[bool] = np.any(table[[each.row for each in followers], :FIRST_WORDS], axis=1).tolist()
        return [
            _fault(each.matcher, allows or bool(table[each.row].any()))
            for each, allows in zip(followers, allows_any, strict=True)
        ]

    def _tell(self, followers: list[Follower], faults: list[str | None]) -> None:
        filled = [each for each, fault in zip(followers, faults, strict=True) if fault is None]
        failed = [(each.key, fault) for each, fault in zip(followers, faults, strict=True) if fault is not None]
        if filled:
            rows, tickets = [each.row for each in filled], [each.ticket for each in filled]
            self._send(MasksFilled(rows, tickets, [each.num_outputs for each in filled]))
        if failed:
            self._send(Fail([key for key, _ in failed], [fault for _, fault in failed]))


def _read_away(reports: RingReader) -> None:
    """What nobody hears any more, to the end of the core."""
    with contextlib.closing(reports), contextlib.suppress(PeerGone):
        while True:
            reports.wait()
            for _ in reports.read():
                pass


def _fault(matcher: LLMatcher, allows_any: bool) -> str | None:
    try:
        check(matcher)
    except GrammarError as error:
        return f"the grammar cannot be followed any further: {error}"
    return None if allows_any else "nothing matches the grammar from here on"
