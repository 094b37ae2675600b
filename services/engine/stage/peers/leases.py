"""The lending side between engines: the sessions of engines that copy blocks from this one.

A lease ends when its records are sent, when its session ends, and when the engine that asked has
been silent for seconds, by whatever comes first. Knows nothing about blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import count, zip_longest

import structlog

from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.peer_link import (
    Claim,
    LeaseCopied,
    LeaseEnd,
    LeaseRequest,
    Lent,
    Places,
    Wanted,
)
from headwater.proto import blocks_pb2 as pb

from ....runtime.session.answering import AnsweringEnd
from ...core.peer_records import UInt8Array

CHUNK_BYTES = 240 * 1024
"""Bytes of records in one frame."""
LOST_SECONDS = 4.0
"""Silence after which an engine has no leases any more."""
SIGN_SECONDS = 0.5
"""Seconds between two signs of life to an engine that waits: the core answers between steps, which
take seconds on CPUs."""


@dataclass(slots=True, eq=False)
class _Sending:
    """A pull whose answer is being sent."""

    pull_id: int
    lent: Lent
    num_bytes: int = 0
    """Bytes of the records that were sent so far."""


class LeaseSession:
    """One engine that copies blocks from this one."""

    def __init__(self, owner: PeerLeases) -> None:
        self._owner = owner
        self._leases: dict[int, int] = {}
        """Keyed by pull, for which the core lends."""
        self._queue: deque[_Sending] = deque()
        self._has_ended = self._is_sign_due = False
        self.received_at = asyncio.get_running_loop().time()
        self._end: AnsweringEnd[pb.BlockFrame, pb.PullFrame] = AnsweringEnd(
            self._next_frame, self._take, lambda is_clean: self.end()
        )

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    async def run(self, incoming: AsyncIterator[pb.PullFrame]) -> AsyncIterator[pb.BlockFrame]:
        """Yields frames for the other engine, until it leaves or is lost."""
        try:
            async with contextlib.aclosing(self._end.run(incoming)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self.end()

    def end(self) -> None:
        """Ends the leases of an engine that is gone, and grants it none any more."""
        self._has_ended = True
        self._queue.clear()
        for pull_id in list(self._leases):
            self._end_lease(pull_id)
        self._end.close()

    def sign(self) -> None:
        """Sends a sign of life."""
        self._is_sign_due = True
        self._end.wake()

    def on_lent(self, pull_id: int, lent: Lent) -> None:
        self._queue.append(_Sending(pull_id, lent))
        self._end.wake()

    def _take(self, frame: pb.PullFrame) -> None:
        if self._has_ended:
            return
        self.received_at = asyncio.get_running_loop().time()
        for pull in frame.pulls:
            if pull.epoch == self._owner.epoch and pull.pull_id not in self._leases:
                self._leases[pull.pull_id] = self._owner.lend(self, pull)
            else:
                # The pull is for an earlier incarnation of this engine, whose blocks are gone.
                self.on_lent(pull.pull_id, Lent(lease=0, rows=[], before=Claim(), after=Claim()))
        for pull_id in frame.copied:
            if (lease := self._leases.get(pull_id)) is not None:
                self._owner.copied(lease)
        for pull_id, num_copied in zip_longest(
            frame.ended, frame.num_copied[: len(frame.ended)], fillvalue=0
        ):
            self._queue = deque(each for each in self._queue if each.pull_id != pull_id)
            self._end_lease(pull_id, num_copied)

    def _next_frame(self) -> pb.BlockFrame | None:
        is_sign_due = self._is_sign_due
        self._is_sign_due = False
        if not self._queue:
            return pb.BlockFrame() if is_sign_due else None
        sending = self._queue[0]
        lent = sending.lent
        frame = pb.BlockFrame(pull_id=sending.pull_id)
        if not sending.num_bytes:
            frame.before.CopyFrom(claim_to_pb(lent.before))
        if lent.places is not None:
            # The lease continues: a message with `after` follows.
            frame.places.CopyFrom(places_to_pb(lent.places))
            self._queue.popleft()
            return frame
        frame.records = self._owner.read(lent, sending.num_bytes)
        sending.num_bytes += len(frame.records)
        if sending.num_bytes == self._owner.num_bytes(lent):
            frame.after.CopyFrom(claim_to_pb(lent.after))
            self._queue.popleft()
            self._end_lease(sending.pull_id)
        return frame

    def _end_lease(self, pull_id: int, num_copied: int = 0) -> None:
        if (lease := self._leases.pop(pull_id, None)) is not None:
            self._owner.end_lease(lease, num_copied)


class PeerLeases:
    """Sessions of all engines that copy blocks from this one. `lend`, `copied` and `end` reach the
    core."""

    def __init__(
        self,
        epoch: int,
        records: UInt8Array,
        *,
        lend: Callable[[LeaseRequest], None],
        copied: Callable[[LeaseCopied], None],
        end: Callable[[LeaseEnd], None],
        may_be_in_step: Callable[[], bool],
    ) -> None:
        """`may_be_in_step`: whether a core that does not answer may be within a step."""
        self._may_be_in_step = may_be_in_step
        self.epoch = epoch
        self._records = records
        self._lend = lend
        self._copied = copied
        self._end = end
        self._sessions: set[LeaseSession] = set()
        self._asked: dict[int, tuple[LeaseSession, int]] = {}
        """Session and pull of each lease."""
        self._numbers = count(1)

    @property
    def num_leases(self) -> int:
        return len(self._asked)

    @contextlib.contextmanager
    def session(self) -> Iterator[LeaseSession]:
        """A session inside the `with` block; leaving it ends its leases."""
        session = LeaseSession(self)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)
            session.end()

    async def watch(self) -> None:
        """Ends the leases of engines that send no sign of life, and sends signs to the others
        unless the core is silent for longer than a step takes; runs until cancelled."""
        while True:
            await asyncio.sleep(SIGN_SECONDS)
            now = asyncio.get_running_loop().time()
            for session in [each for each in self._sessions if each.num_leases]:
                if now - session.received_at > LOST_SECONDS:
                    structlog.get_logger().warning(
                        "an engine that pulls blocks is silent", leases=session.num_leases
                    )
                    session.end()
                elif self._may_be_in_step():
                    session.sign()

    def lend(self, session: LeaseSession, pull: pb.Pull) -> int:
        lease = next(self._numbers)
        self._asked[lease] = session, pull.pull_id
        owner = Owner(pull.namespace, pull.tenant)
        wanted = Wanted(
            key=pull.key, owner=owner, parent=pull.parent, hashes=list(pull.block_hashes)
        )
        self._lend(LeaseRequest(lease=lease, wanted=wanted, is_direct=pull.direct))
        return lease

    def copied(self, lease: int) -> None:
        self._copied(LeaseCopied(lease=lease))

    def on_lent(self, lent: Lent) -> None:
        """Sends the other engine blocks that the core has copied; nothing for a lease that has
        ended."""
        if (asked := self._asked.get(lent.lease)) is not None:
            asked[0].on_lent(asked[1], lent)

    def end_lease(self, lease: int, num_copied: int = 0) -> None:
        if self._asked.pop(lease, None) is not None:
            self._end(LeaseEnd(lease=lease, num_copied=num_copied))

    def num_bytes(self, lent: Lent) -> int:
        return len(lent.rows) * int(self._records.shape[1])

    def read(self, lent: Lent, start: int) -> bytes:
        """The next bytes of the records after `start`, up to the end of one record."""
        if start >= self.num_bytes(lent):
            return b""
        number, at = divmod(start, self._records.shape[1])
        return self._records[lent.rows[number], at : at + CHUNK_BYTES].tobytes()


def claim_to_pb(claim: Claim) -> pb.Claim:
    return pb.Claim(key=claim.key, block_hashes=claim.hashes, generations=claim.generations)


def places_to_pb(places: Places) -> pb.Places:
    return pb.Places(handle=places.handle, blocks=places.blocks, published=places.published)
