"""Pulls that copy blocks out of another engine's KV cache into this one's, where both engines are
of one host.

No record is made and nothing is summed up: the other engine pins the blocks and says where they
are, this one copies them, and the other one says what they are once more. A block is used only
where both claims name it.

Where the other engine publishes its blocks in memory that this one reads, no answer is waited for:
the copy begins while the lease is still asked for, and whether the blocks were handed out meanwhile
is looked up when it has ended. Knows hashes and blocks; knows nothing about sockets or requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..executor import DirectCopies, DirectCopy, Int32Array
from ..request import Holder
from .block_source import Ticket
from .peer_link import (
    Claim,
    PeerLink,
    Placed,
    Places,
    PullCopied,
    Pulled,
    PullEnd,
    PullRequest,
    Wanted,
)
from .prefix_hash import num_common
from .published_blocks import BlocksView, Found

log = logging.getLogger(__name__)


class DirectEnd(NamedTuple):
    """How a direct pull ended."""

    ticket: Ticket
    num_usable: int
    """Number of leading blocks that are copied into this engine's cache."""
    is_cancelled: bool
    goes_by_records: bool
    """Whether the pull must be repeated with records: nothing was copied, although the other engine
    may have the blocks."""


@dataclass(slots=True, eq=False)
class _Pull:
    number: int
    ticket: Ticket
    holder: Holder
    copy: DirectCopy | None = None
    num_copied: int = 0
    check: _Check | None = None
    """How the copy is compared without an answer; None: the other engine claims its blocks once
    more."""
    is_reported: bool = False
    """Whether the other engine knows that the blocks were copied."""
    answer: Pulled | None = None
    num_unchanged: int | None = None
    """Number of leading blocks that did not change during the copy; None: not checked yet."""
    is_cancelled: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether its blocks are still to be copied."""
        return self.copy is None and self.answer is None and not self.is_cancelled

    @property
    def is_copied(self) -> bool:
        return self.copy is not None and self.copy.is_done

    @property
    def has_ended(self) -> bool:
        """Whether the pull is over: nothing writes to the ticket's blocks any more, and no message
        about it follows."""
        is_answered = self.answer is not None or self.num_unchanged is not None
        return is_answered and (self.copy is None or self.copy.is_done)


class _Check(NamedTuple):
    view: BlocksView
    found: Found
    """Blocks that were copied, with their generations before the copy."""


class _Engine(NamedTuple):
    """Memory of another engine, as it announced it."""

    handle: bytes
    view: BlocksView | None


class DirectPulls:
    """Pulls by their numbers, which their owner gives."""

    def __init__(self, copies: DirectCopies, link: PeerLink) -> None:
        self._copies = copies
        self._link = link
        self._open_view: Callable[[bytes], BlocksView] = BlocksView
        self._pulls: dict[int, _Pull] = {}
        self._new = deque[_Pull]()
        """Pulls that were not launched yet."""
        self._unreachable: set[tuple[str, int]] = set()
        """Engines whose memory could not be opened, by address and incarnation."""
        self._engines: dict[tuple[str, int], _Engine] = {}
        """Engines whose memory is open."""
        self._left: set[tuple[str, int]] = set()
        """Engines without a session, whose blocks are still being copied."""

    def __len__(self) -> int:
        return len(self._pulls)

    def reaches(self, holder: Holder) -> bool:
        """Whether blocks of that engine may be copied, as far as is known."""
        return (holder.address, holder.epoch) not in self._unreachable

    def pull(self, number: int, ticket: Ticket, holder: Holder, wanted: Wanted) -> None:
        """Asks for a lease. Where the other engine publishes all of the blocks, they are copied
        meanwhile, from `launch` on."""
        pull = self._pulls[number] = _Pull(number, ticket, holder)
        self._new.append(pull)
        self._link.send(
            PullRequest(pull=number, holder=holder, wanted=wanted, rows=[], is_direct=True)
        )

    def launch(self) -> None:
        """Begins copies of published blocks. What the targets contained before may have to be
        copied first: other sources launch before this one."""
        while self._new:
            pull = self._new.popleft()
            engine = self._engines.get((pull.holder.address, pull.holder.epoch))
            if engine is None or engine.view is None or not pull.is_waiting:
                continue
            found = engine.view.find(pull.ticket.hashes)
            # The other engine answers for blocks that are not computed yet, or are in a tier behind
            # the KV cache.
            if len(found.blocks) == len(pull.ticket.hashes) and self._copy(
                pull, engine.handle, found.blocks
            ):
                pull.check = _Check(engine.view, found)

    def placed(self, message: Placed) -> None:
        """Copies the blocks that the other engine has pinned. A second message for a pull is
        ignored."""
        pull = self._pulls.get(message.pull)
        if pull is None or not pull.is_waiting:
            return
        num_blocks = min(self._num_claimed(pull, message.before), len(message.places.blocks))
        if not num_blocks:
            self._link.send(PullEnd(pull=pull.number))
            return
        # Also where the copy is refused, the cache may be open by then.
        engine = self._open(pull.holder, message.places)
        sources = np.array(message.places.blocks[:num_blocks], np.int32)
        if not self._copy(pull, engine.handle, sources):
            self._link.send(PullEnd(pull=pull.number))
        elif engine.view is not None:
            generations = np.array(message.before.generations[:num_blocks], np.uint64)
            pull.check = _Check(engine.view, Found(sources, generations))

    def pulled(self, answer: Pulled) -> None:
        """Takes the link's answer; a second one to the same pull does not count."""
        if (pull := self._pulls.get(answer.pull)) is not None and pull.answer is None:
            # A claim made before the copy ended says nothing of the bytes that the copy read.
            pull.answer = (
                answer
                if pull.is_reported
                else Pulled(pull=answer.pull, before=answer.before, after=Claim())
            )

    def left(self, holder: Holder) -> None:
        """Unmaps the memory of an engine whose session has ended: it may be dead, and its successor
        needs the memory."""
        if (holder.address, holder.epoch) in self._engines:
            self._left.add((holder.address, holder.epoch))
            self._close_left()

    def cancel(self, ticket: Ticket) -> None:
        """Ends a pull, once nothing is being copied for it."""
        for pull in self._pulls.values():
            if pull.ticket is ticket and not pull.is_cancelled:
                pull.is_cancelled = True
                self._link.send(PullEnd(pull=pull.number))

    @property
    def is_busy(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._pulls or self._left)

    def poll(self) -> list[DirectEnd]:
        """Pulls that ended since the last call."""
        for pull in self._pulls.values():
            if pull.is_copied and not pull.is_reported and pull.answer is None:
                pull.is_reported = True
                self._end_copy(pull)
        ended = [pull for pull in self._pulls.values() if pull.has_ended]
        for pull in ended:
            del self._pulls[pull.number]
        if self._left:
            self._close_left()
        return [self._end_of(pull) for pull in ended]

    def _close_left(self) -> None:
        copied_from = {
            (pull.holder.address, pull.holder.epoch)
            for pull in self._pulls.values()
            if pull.copy is not None and not pull.copy.is_done
        }
        for engine in self._left - copied_from:
            self._copies.close(self._engines.pop(engine).handle)
        self._left &= copied_from

    def _open(self, holder: Holder, places: Places) -> _Engine:
        """Notes how the memory of an engine is opened, and maps the memory that it publishes."""
        key = holder.address, holder.epoch
        if (engine := self._engines.get(key)) is None:
            view = None
            if places.published:
                try:
                    view = self._open_view(places.published)
                except OSError as error:
                    log.info("what %s publishes is not read: %s", holder.address, error)
            engine = self._engines[key] = _Engine(places.handle, view)
        return engine

    def _copy(self, pull: _Pull, handle: bytes, sources: Int32Array) -> bool:
        """Launches the copy of a pull's leading blocks. False where the memory cannot be opened."""
        targets = np.array(pull.ticket.blocks[: len(sources)], np.int32)
        try:
            pull.copy = self._copies.copy(handle, sources, targets)
        except OSError as error:
            log.info("blocks of %s come as records: %s", pull.holder.address, error)
            self._unreachable.add((pull.holder.address, pull.holder.epoch))
            return False
        pull.num_copied = len(sources)
        return True

    def _end_copy(self, pull: _Pull) -> None:
        """Checks that the copied blocks did not change, or asks the other engine for their
        generations."""
        if pull.check is None:
            self._link.send(PullCopied(pull=pull.number))
            return
        pull.num_unchanged = pull.check.view.num_unchanged(pull.check.found)
        if not pull.is_cancelled:
            self._link.send(PullEnd(pull=pull.number, num_copied=pull.num_copied))

    def _end_of(self, pull: _Pull) -> DirectEnd:
        if pull.num_unchanged is not None:
            return DirectEnd(
                pull.ticket, pull.num_unchanged, pull.is_cancelled, goes_by_records=False
            )
        answer = pull.answer
        num_usable = 0
        assert answer is not None
        if pull.copy is not None and not pull.is_cancelled:
            is_ours = answer.after.key == self._link.key
            num_common = min(
                self._num_claimed(pull, answer.before), answer.before.num_common(answer.after)
            )
            num_usable = min(num_common, pull.num_copied) if is_ours else 0
        by_records = pull.copy is None and (
            answer.before.key == self._link.key or not self.reaches(pull.holder)
        )
        return DirectEnd(
            pull.ticket, num_usable, pull.is_cancelled, by_records and not pull.is_cancelled
        )

    def _num_claimed(self, pull: _Pull, claim: Claim) -> int:
        """Number of leading wanted blocks that the other engine has, with the same key."""
        return num_common(claim.hashes, pull.ticket.hashes) if claim.key == self._link.key else 0
