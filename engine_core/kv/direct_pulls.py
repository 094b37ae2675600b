"""Pulls that copy blocks out of another engine's KV cache into this one's, where both engines are of one host.

No record is made and nothing is summed up: the other engine pins the blocks and says where they are, this one copies
them, and the other one says what they are once more. A block is used only where both claims name it. Knows hashes and
blocks; knows nothing about sockets or requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..executor import DirectCopies, DirectCopy
from ..request import Holder
from .block_source import Ticket
from .peer_link import Claim, PeerLink, Placed, PullCopied, Pulled, PullEnd, PullRequest, Wanted

log = logging.getLogger(__name__)


class DirectEnd(NamedTuple):
    """How a direct pull ended."""

    ticket: Ticket
    num_usable: int
    """Leading blocks that are in their places here."""
    is_cancelled: bool
    goes_by_records: bool
    """Whether the blocks have to come as records, if at all: nothing was copied, and that is not for want of them."""


@dataclass(slots=True, eq=False)
class _Pull:
    number: int
    ticket: Ticket
    holder: Holder
    copy: DirectCopy | None = None
    num_copied: int = 0
    is_told: bool = False
    """Whether the other engine knows that the blocks were copied."""
    answer: Pulled | None = None
    is_cancelled: bool = False

    @property
    def has_ended(self) -> bool:
        """Nobody writes to the ticket's blocks any more, and nothing more will be said."""
        return self.answer is not None and (self.copy is None or self.copy.is_done)


class DirectPulls:
    """Pulls by their numbers, which their owner gives."""

    def __init__(self, copies: DirectCopies, link: PeerLink) -> None:
        self._copies, self._link = copies, link
        self._pulls: dict[int, _Pull] = {}
        self._unreachable: set[tuple[str, int]] = set()
        """Engines whose memory could not be opened, by address and incarnation."""
        self._handles: dict[tuple[str, int], bytes] = {}
        """What is open, by engine."""
        self._left: set[tuple[str, int]] = set()
        """Engines to which there is no session any more, and whose blocks are still being copied."""

    def __len__(self) -> int:
        return len(self._pulls)

    def reaches(self, holder: Holder) -> bool:
        """Whether blocks of that engine may be copied, as far as is known."""
        return (holder.address, holder.epoch) not in self._unreachable

    def pull(self, number: int, ticket: Ticket, holder: Holder, wanted: Wanted) -> None:
        self._pulls[number] = _Pull(number, ticket, holder)
        self._link.send(PullRequest(pull=number, holder=holder, wanted=wanted, rows=[], is_direct=True))

    def placed(self, message: Placed) -> None:
        """Copies the blocks that the other engine has pinned; a second word of one pull does not count."""
        pull = self._pulls.get(message.pull)
        if pull is None or pull.is_cancelled or pull.copy is not None or pull.answer is not None:
            return
        num_blocks = min(self._num_claimed(pull, message.before), len(message.places.blocks))
        if not num_blocks:
            self._link.send(PullEnd(pull=pull.number))
            return
        blocks = [message.places.blocks[:num_blocks], pull.ticket.blocks[:num_blocks]]
        sources, targets = np.array(blocks, np.int32)
        # Also where the copy is refused, the cache may be open by then.
        self._handles[pull.holder.address, pull.holder.epoch] = message.places.handle
        try:
            pull.copy = self._copies.copy(message.places.handle, sources, targets)
        except OSError as error:
            log.info("blocks of %s come as records: %s", pull.holder.address, error)
            self._unreachable.add((pull.holder.address, pull.holder.epoch))
            self._link.send(PullEnd(pull=pull.number))
            return
        pull.num_copied = num_blocks

    def pulled(self, answer: Pulled) -> None:
        """Takes the link's answer; a second one to the same pull does not count."""
        if (pull := self._pulls.get(answer.pull)) is not None and pull.answer is None:
            # What was claimed before the copy had ended says nothing of what it read.
            pull.answer = answer if pull.is_told else Pulled(pull=answer.pull, before=answer.before, after=Claim())

    def left(self, holder: Holder) -> None:
        """Lets go of the memory of an engine to which there is no session any more: it may be dead, and its successor
        needs the room."""
        if (holder.address, holder.epoch) in self._handles:
            self._left.add((holder.address, holder.epoch))
            self._close_left()

    def cancel(self, ticket: Ticket) -> None:
        """The pull ends once nothing is copied for it."""
        for pull in self._pulls.values():
            if pull.ticket is ticket and not pull.is_cancelled:
                pull.is_cancelled = True
                self._link.send(PullEnd(pull=pull.number))

    def poll(self) -> list[DirectEnd]:
        """Those that ended since the last call."""
        for pull in self._pulls.values():
            is_copied = pull.copy is not None and pull.copy.is_done
            if is_copied and not pull.is_told and pull.answer is None:
                pull.is_told = True
                self._link.send(PullCopied(pull=pull.number))
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
            self._copies.close(self._handles.pop(engine))
        self._left &= copied_from

    def _end_of(self, pull: _Pull) -> DirectEnd:
        answer, num_usable = pull.answer, 0
        assert answer is not None
        if pull.copy is not None and not pull.is_cancelled:
            is_ours = answer.after.key == self._link.key
            num_common = min(self._num_claimed(pull, answer.before), answer.before.num_common(answer.after))
            num_usable = min(num_common, pull.num_copied) if is_ours else 0
        by_records = pull.copy is None and (answer.before.key == self._link.key or not self.reaches(pull.holder))
        return DirectEnd(pull.ticket, num_usable, pull.is_cancelled, by_records and not pull.is_cancelled)

    def _num_claimed(self, pull: _Pull, claim: Claim) -> int:
        """Leading blocks of those that are wanted that the other engine says it has, of the same key."""
        if claim.key != self._link.key:
            return 0
        for num_equal, (claimed, wanted) in enumerate(zip(claim.hashes, pull.ticket.hashes, strict=False)):
            if claimed != wanted:
                return num_equal
        return min(len(claim.hashes), len(pull.ticket.hashes))
