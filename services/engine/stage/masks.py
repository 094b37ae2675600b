"""Follows the grammar of each request that has one: reads its tokens, writes the next one's mask
into the core's table.

Works in a thread that receives drawn tokens from the core itself: neither tokens nor masks pass
through the event loop. Masks are computed outside the interpreter lock, while the device computes
the step that they are for; one report after another, so that a row's masks are written in the order
in which its holders asked.

Drafts are read by copies of the matchers, which cost a microsecond or two: what happens to a copy,
such as the end of the answer or too high a cost, does not affect the answer itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher

from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import MaskReport, MasksWanted
from headwater.engine_core.system.ring import PeerGone, RingReader
from headwater.engine_core.system.usable_cores import usable_cores

from ...grammars.compiler_errors import in_our_words
from ..core.mask_table import Int32Array
from ..core.messages import Command, Fail, Forced, MasksFilled, decode_mask_report
from .token_bounds import TokenBounds, bounds_of

MAX_THREADS = 8
SWITCH_SECONDS = 0.00005
"""Seconds after which the interpreter switches to another thread that waits."""
FIRST_WORDS = 64
"""Words of a mask that are looked at first: single bytes have low ids in most vocabularies, and
where anything is allowed, so is its first byte."""

EVERYTHING = -1
"""A word of a mask that allows all its tokens."""


def num_mask_threads() -> int:
    """Threads that write masks at the same time."""
    return max(1, min(MAX_THREADS, usable_cores() // 2))


@dataclass(slots=True, eq=False)
class Family:
    """Copies of one compiled grammar. They share a lock, so one copy advances at a time."""

    root: LLMatcher
    seconds: float
    """Time that it took to compile."""
    computed_seconds: float = 0.0
    """Time of it on a processor."""
    num_bytes: int = 0
    """Bytes that compiling it allocated."""
    num_members: int = 0
    is_spent: bool = False
    """Whether a copy has failed. Copies share their caches and limits, so another copy would fail
    earlier."""


@dataclass(slots=True, eq=False, kw_only=True)
class Follower:
    """One answer and the state of its grammar."""

    key: int
    matcher: LLMatcher
    family: Family
    unread: list[int]
    num_outputs: int
    """Tokens of the answer, those unread included."""
    row: int = -1
    """Row of the mask table; -1 while it has none."""
    ticket: int = 0
    has_mask: bool = False
    """Whether the row has the mask of the next token."""
    num_words: int = 0
    """Words of that mask that are not zero, or a smaller number from 2 on."""
    draft_ids: list[int] = field(default_factory=list)
    """Drafted tokens, for which masks are wanted beside that of the next token."""
    is_drafted: bool = True
    """Whether what the grammar forces may be drafted."""
    forced_ids: list[int] = field(default_factory=list)
    """Tokens that the grammar forces next, as far as that was asked."""
    bounds: TokenBounds | None = None
    """Bounds of the request's sampling; None: it sets none."""
    last_ids: list[int] = field(default_factory=list)
    """The answer's last tokens, as many as the bounds look at."""

    def read(self, token_ids: list[int]) -> None:
        """Moves the matcher on by tokens of the answer."""
        if self.bounds is not None:
            self._keep(self.bounds.num_looked_at, token_ids)
        self.unread += token_ids
        self.num_outputs += len(token_ids)
        self.has_mask = False
        self.draft_ids = []
        if self.forced_ids:
            is_forced = self.forced_ids[: len(token_ids)] == token_ids
            self.forced_ids = self.forced_ids[len(token_ids) :] if is_forced else []

    def restrict(self, mask: Int32Array, num_drafts: int = 0) -> None:
        """Takes out of a mask [words] behind so many drafts what the bounds forbid."""
        if self.bounds is not None:
            last_ids = [*self.last_ids, *self.draft_ids[:num_drafts]]
            self.bounds.restrict(mask, last_ids, self.num_outputs + num_drafts)

    def _keep(self, num_kept: int, token_ids: list[int]) -> None:
        if num_kept:
            self.last_ids = [*self.last_ids, *token_ids][-num_kept:]


class MaskWriter:
    """Writes masks for the core. `table`: int32 [positions, rows, words], read by the core. `send`
    passes reports to the core, from the thread. `observe` gets the seconds from a drawn token to
    its mask. Requests come and go on the event loop."""

    def __init__(
        self, table: Int32Array, send: Callable[[Command], None], observe: Callable[[float], None]
    ) -> None:
        self._table = table
        self._send = send
        self._observe = observe
        # Drafts of the next step, and where that step is in flight, of the step after it.
        self._most_forced = 2 * len(table) - 1 if len(table) > 1 else 0
        self._followers: dict[int, Follower] = {}
        self._holders: dict[int, Follower] = {}
        """Keyed by row."""
        self._thread = ThreadPoolExecutor(1, "masks")
        num_threads = num_mask_threads()
        # None: this thread computes masks by itself, without waking another one.
        self._crew = LLExecutor(num_threads) if num_threads > 1 else None

    def follow(
        self,
        key: int,
        matcher: LLMatcher,
        family: Family,
        output_ids: Sequence[int],
        *,
        is_drafted: bool = True,
        sampling: SamplingParams | None = None,
    ) -> None:
        """Follows a grammar from its start, before the core knows of the request; `output_ids` is
        what a resumed answer has already. With `is_drafted` the core gets the tokens that the
        grammar forces. Masks hold to the bounds of `sampling`."""
        follower = self._followers[key] = Follower(
            key=key,
            matcher=matcher,
            family=family,
            unread=[],
            num_outputs=0,
            is_drafted=is_drafted and self._most_forced > 0,
            bounds=None if sampling is None else bounds_of(sampling, self._table.shape[2]),
        )
        follower.read(list(output_ids))

    def forget(self, key: int) -> None:
        """Stops following a request that has ended, if it was followed at all."""
        if (follower := self._followers.pop(key, None)) is not None:
            follower.family.num_members -= 1

    async def run(self, reports: RingReader) -> None:
        """Writes masks until cancelled; raises errors of writing. The thread ends with the core,
        which does not wait for it."""
        before = sys.getswitchinterval()
        # The thread shall not wait for the loop to be done with a step's other news: the device
        # waits for the thread.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._thread, self._read_along, reports
            )
            await asyncio.Event().wait()
        finally:
            self._thread.submit(_read_away, reports)
            sys.setswitchinterval(before)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _read_along(self, reports: RingReader) -> None:
        def read() -> Iterator[MaskReport]:
            return map(decode_mask_report, reports.read())

        with contextlib.suppress(PeerGone):
            while True:
                reports.wait()
                self.on_reports(*read(), following=read)

    def on_reports(
        self, *reports: MaskReport, following: Callable[[], Iterable[MaskReport]] = tuple
    ) -> None:
        """Writes the masks that can be written now, and reports them. In one thread at a time.
        `following` returns reports that came meanwhile: a step's drafts follow its tokens, and rows
        whose masks are reported separately are drawn separately."""
        start = time.perf_counter()
        due = dict[int, Follower]()
        faults = dict[int, str]()
        self._advance(reports, due, faults)
        self._advance(following(), due, faults)
        if due:
            followers = list(due.values())
            self._fill_behind_drafts(
                [each for each in followers if each.draft_ids and each.key not in faults]
            )
            self._report(followers, faults)
            self._observe(time.perf_counter() - start)
            self._force([each for each in followers if each.is_drafted and each.has_mask])

    def _advance(
        self, reports: Iterable[MaskReport], due: dict[int, Follower], faults: dict[int, str]
    ) -> None:
        """Notes followers that are due a mask, writes the masks of next tokens, and notes faults by
        key."""
        for report in reports:
            if report.wanted is not None:
                self._seat(report.wanted, due)
            self._read(report, due)
        # Each thread computes a range of the list. Matchers of a family wait for one another, so
        # they are adjacent.
        waiting = [each for each in due.values() if not (each.has_mask or each.key in faults)]
        waiting.sort(key=lambda follower: id(follower.family))
        if waiting:
            self._consume(waiting)
            self._fill(waiting, faults)

    def _seat(self, wanted: MasksWanted, due: dict[int, Follower]) -> None:
        draft_ids = wanted.draft_ids or [[] for _ in wanted.keys]
        for key, row, ticket, drafts in zip(
            wanted.keys, wanted.rows, wanted.tickets, draft_ids, strict=True
        ):
            if (follower := self._followers.get(key)) is None:
                continue
            # The request that had this row has lost it and waits for another one. The row that the
            # follower had before belongs to another request, or soon will.
            if (before := self._holders.pop(row, None)) is not None:
                before.row = -1
                due.pop(before.key, None)
            self._holders.pop(follower.row, None)
            follower.has_mask &= follower.ticket == ticket
            follower.row = row
            follower.ticket = ticket
            follower.draft_ids = drafts
            self._holders[row] = due[key] = follower

    def _read(self, report: MaskReport, due: dict[int, Follower]) -> None:
        end = 0
        for key, num_tokens in zip(report.keys, report.num_tokens, strict=True):
            start = end
            end = end + num_tokens
            if (follower := self._followers.get(key)) is not None:
                follower.read(report.token_ids[start:end])
                if follower.row >= 0:
                    due[key] = follower

    def _consume(self, followers: list[Follower]) -> None:
        """A token that the grammar does not take leaves an error in the matcher."""
        self._consume_one(
            [(each.matcher, each.unread.pop()) for each in followers if len(each.unread) == 1]
        )
        for each in followers:
            if each.unread:
                each.matcher.consume_tokens(each.unread)
                each.unread.clear()

    def _consume_one(self, tokens: list[tuple[LLMatcher, int]]) -> None:
        if self._crew is not None and len(tokens) > 1:
            self._crew.consume_token_par(tokens)
        else:
            for matcher, token_id in tokens:
                matcher.consume_token(token_id)

    def _fill(self, followers: list[Follower], faults: dict[int, str]) -> None:
        table = self._table[0]
        self._compute(
            [(each.matcher, each.row) for each in followers if not each.matcher.is_error()], table
        )
        for each in followers:
            if each.bounds is not None:
                each.restrict(table[each.row])
        rows = [each.row for each in followers]
        num_first: list[int] = np.count_nonzero(table[rows, :FIRST_WORDS], axis=1).tolist()
        for each, num_words in zip(followers, num_first, strict=True):
            each.num_words = num_words if num_words > 1 else int(np.count_nonzero(table[each.row]))
            each.has_mask = each.num_words > 0 and not each.matcher.is_error()
            if not each.has_mask:
                faults[each.key] = _fault(each)
                each.family.is_spent |= each.matcher.is_error()

    def _fill_behind_drafts(self, followers: list[Follower]) -> None:
        """Writes a mask after each draft, position by position. After a draft that its mask forbids
        all tokens are allowed: the draft is rejected, and a mask must allow some token. The same
        holds after a draft that the grammar cannot follow; the answer ends when that draft is read
        as a token."""
        readers = {each.key: each.matcher.deep_copy() for each in followers}
        for place in range(max((len(each.draft_ids) for each in followers), default=0)):
            followers = [each for each in followers if place < len(each.draft_ids)]
            masks = self._table[place]
            behind = self._table[place + 1]
            going = [
                each for each in followers if each.key in readers and _allows(masks, each, place)
            ]
            self._consume_one([(readers[each.key], each.draft_ids[place]) for each in going])
            self._compute([(readers[each.key], each.row) for each in going], behind)
            for each in going:
                each.restrict(behind[each.row], place + 1)
            good = {
                each.key
                for each in going
                if not readers[each.key].is_error() and behind[each.row].any()
            }
            readers = {key: reader for key, reader in readers.items() if key in good}
            behind[[each.row for each in followers if each.key not in good]] = EVERYTHING

    def _compute(self, matchers: list[tuple[LLMatcher, int]], masks: Int32Array) -> None:
        """Writes the mask of each matcher into a row of masks [rows, words]."""
        address = masks.ctypes.data
        num_bytes = masks.strides[0]
        if self._crew is not None and len(matchers) > 1:
            self._crew.unsafe_compute_mask_ptr(matchers, address, num_bytes, len(masks))
        else:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)

    def _report(self, followers: list[Follower], faults: dict[int, str]) -> None:
        if filled := [each for each in followers if each.key not in faults]:
            rows = [each.row for each in filled]
            tickets = [each.ticket for each in filled]
            num_masks = [1 + len(each.draft_ids) for each in filled]
            self._send(MasksFilled(rows, tickets, [each.num_outputs for each in filled], num_masks))
        if faults:
            self._send(Fail(list(faults), list(faults.values())))
        for each in followers:
            each.draft_ids = []

    def _force(self, followers: list[Follower]) -> None:
        """Sends the core the tokens that a grammar forces, where the next mask allows a single
        token; the draw of that token does not wait for this. llguidance makes such masks wherever
        the grammar forces text, with the tokens of the tokenizer's spelling."""
        for each in followers:
            if each.num_words == 1 and not each.forced_ids and _is_single(self._table[0, each.row]):
                each.forced_ids = each.matcher.deep_copy().compute_ff_tokens()
        if forced := [each for each in followers if each.forced_ids]:
            rows = [each.row for each in forced]
            tickets = [each.ticket for each in forced]
            forced_ids = [each.forced_ids[: self._most_forced] for each in forced]
            self._send(Forced(rows, tickets, [each.num_outputs for each in forced], forced_ids))


def _is_single(mask: Int32Array) -> bool:
    """Whether a mask [words] with one word that is not zero allows one token alone."""
    word = int(mask[np.flatnonzero(mask)[0]])
    return word.bit_count() == 1


def _allows(masks: Int32Array, follower: Follower, place: int) -> bool:
    """Whether masks [rows, words] have the follower's draft of that place."""
    word, bit = divmod(follower.draft_ids[place], 32)
    return bool(masks[follower.row, word] >> bit & 1)


def _read_away(reports: RingReader) -> None:
    """Reads the core's messages to its end and drops them, so that the core never waits for
    room."""
    with contextlib.closing(reports), contextlib.suppress(PeerGone):
        while True:
            reports.wait()
            for _ in reports.read():
                pass


def _fault(follower: Follower) -> str:
    if follower.matcher.is_error():
        reason = in_our_words(follower.matcher.get_error())
        return f"the grammar cannot be followed any further: {reason}"
    left = "that allowed_token_ids and bad_words leave " if follower.bounds is not None else ""
    return f"nothing {left}matches the grammar from here on"
