"""The pulling side between engines: one session with each engine from which this one copies blocks.

Brings bytes into the rows that the core named and answers every pull once, whatever becomes of it.
What the bytes are is the core's to verify.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from headwater.engine_core.kv.peer_link import (
    Claim,
    HolderLeft,
    Placed,
    Places,
    PullCopied,
    Pulled,
    PullEnd,
    PullRequest,
)
from headwater.engine_core.request import Holder
from headwater.proto import blocks_pb2 as pb
from headwater.proto import blocks_pb2_grpc

from ....runtime.channel import open_channel
from ....runtime.session.calling import CallingEnd
from ....runtime.tasks import end, owned_task, start_in
from ...core.peer_records import UInt8Array

LIFE_SECONDS = 1.0
"""Seconds between two signs of life of a session."""
SILENT_TURNS = 4
"""Signs of life within which something has to come while a pull waits."""
IDLE_TURNS = 30
"""Signs of life after which a session without pulls ends."""
MAX_PULLS = 64
"""Number of pulls in one frame."""


@dataclass(slots=True, eq=False)
class _OpenPull:
    request: PullRequest
    before: Claim = field(default_factory=Claim)
    num_bytes: int = 0
    """Bytes of the records that came so far."""
    is_copying: bool = False
    """Whether this engine copies the blocks from their places. The other one owes no answer
    meanwhile."""


class PullSession:
    """Pulls from one engine, until the session breaks or nothing was pulled for long."""

    def __init__(
        self,
        address: str,
        epoch: int,
        records: UInt8Array,
        answer: Callable[[Pulled], None],
        place: Callable[[Placed], None],
    ) -> None:
        self.address = address
        self._epoch = epoch
        self._records = records
        self._answer = answer
        self._place = place
        self._pulls: dict[int, _OpenPull] = {}
        self._queue: deque[PullRequest] = deque()
        self._ended: dict[int, int] = {}
        """Blocks that were copied for each pull that is over."""
        self._copied: list[int] = []
        self._is_sign_due = False
        self._num_idle = self._num_silent = 0
        self._end: CallingEnd[pb.PullFrame, pb.BlockFrame] = CallingEnd(
            self._next_frame, self._on_frame
        )

    def pull(self, request: PullRequest) -> None:
        self._pulls[request.pull] = _OpenPull(request)
        self._queue.append(request)
        self._end.wake()

    def copied(self, number: int) -> None:
        """The blocks of a direct pull were copied."""
        if (pull := self._pulls.get(number)) is not None:
            pull.is_copying = False
            self._copied.append(number)
            self._end.wake()

    def end_pull(self, number: int, num_copied: int = 0) -> None:
        """Ends a pull that is no longer wanted: answers it at once, and ignores blocks that still
        arrive."""
        if self._pulls.pop(number, None) is not None:
            self._ended[number] = num_copied
            self._end.wake()
            self._answer(Pulled(pull=number, before=Claim(), after=Claim()))

    async def run(self) -> None:
        """Runs the session; answers pulls that are open when it ends."""
        try:
            async with open_channel(self.address) as channel:
                call = blocks_pb2_grpc.BlocksStub(channel).Pull()
                session = asyncio.ensure_future(self._end.run(channel, call, lambda: None))
                async with owned_task(self._watch()) as watch:
                    await asyncio.wait([session, watch], return_when=asyncio.FIRST_COMPLETED)
                await end(session)
        finally:
            for number in list(self._pulls):
                self.end_pull(number)

    async def _watch(self) -> None:
        """Returns when the other engine is silent for too long although it owes an answer, or no
        pull came for long."""
        while self._num_silent < SILENT_TURNS and self._num_idle < IDLE_TURNS:
            await asyncio.sleep(LIFE_SECONDS)
            is_owed = any(not pull.is_copying for pull in self._pulls.values())
            self._num_silent = self._num_silent + 1 if is_owed else 0
            self._num_idle = 0 if self._pulls else self._num_idle + 1
            self._is_sign_due = True
            self._end.wake()
        if self._pulls:
            structlog.get_logger().warning(
                "an engine that blocks are pulled from is silent", address=self.address
            )

    def _next_frame(self) -> pb.PullFrame | None:
        if not (self._queue or self._ended or self._copied or self._is_sign_due):
            return None
        asked = [self._queue.popleft() for _ in range(min(MAX_PULLS, len(self._queue)))]
        pulls = [
            pull_to_pb(request, self._epoch) for request in asked if request.pull in self._pulls
        ]
        frame = pb.PullFrame(
            pulls=pulls, ended=self._ended, copied=self._copied, num_copied=self._ended.values()
        )
        self._ended = {}
        self._copied = []
        self._is_sign_due = False
        return frame

    def _on_frame(self, frame: pb.BlockFrame) -> None:
        """Takes a frame of the session. Raises `ValueError` for more bytes than were asked for."""
        self._num_silent = 0
        if (pull := self._pulls.get(frame.pull_id)) is None:
            return
        if frame.HasField("before"):
            pull.before = claim_of(frame.before)
        if frame.HasField("places"):
            pull.is_copying = True
            self._place(
                Placed(pull=frame.pull_id, before=pull.before, places=places_of(frame.places))
            )
            return
        self._store(pull, frame.records)
        if frame.HasField("after"):
            del self._pulls[frame.pull_id]
            is_whole = (
                pull.request.is_direct
                or pull.num_bytes == len(pull.before.hashes) * self._records.shape[1]
            )
            after = claim_of(frame.after) if is_whole else Claim()
            self._answer(Pulled(pull=frame.pull_id, before=pull.before, after=after))

    def _store(self, pull: _OpenPull, data: bytes) -> None:
        row_bytes = self._records.shape[1]
        rest = memoryview(data)
        while rest:
            number, start = divmod(pull.num_bytes, row_bytes)
            if number >= len(pull.request.rows):
                raise ValueError(
                    f"pull {pull.request.pull} has more than {len(pull.request.rows)} records"
                )
            part = rest[: row_bytes - start]
            row = self._records[pull.request.rows[number]]
            memoryview(row)[start : start + len(part)] = part
            pull.num_bytes += len(part)
            rest = rest[len(part) :]


class PeerPulls:
    """Sessions with all engines that blocks are pulled from; each begins with its first pull."""

    def __init__(
        self,
        records: UInt8Array,
        *,
        answer: Callable[[Pulled], None],
        place: Callable[[Placed], None],
        leave: Callable[[HolderLeft], None],
    ) -> None:
        """Callbacks that answer the core: about a pull, the addresses of a direct one, and a
        session that is over."""
        self._records = records
        self._answer = answer
        self._place = place
        self._leave = leave
        self._sessions: dict[tuple[str, int], PullSession] = {}
        self._session_of: dict[int, PullSession] = {}
        """Keyed by number of each pull that is open."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await end(*self._tasks)

    def pull(self, request: PullRequest) -> None:
        session = self._session_of[request.pull] = self._to(
            request.holder.address, request.holder.epoch
        )
        session.pull(request)

    def copied(self, message: PullCopied) -> None:
        if (session := self._session_of.get(message.pull)) is not None:
            session.copied(message.pull)

    def end_pull(self, message: PullEnd) -> None:
        if (session := self._session_of.get(message.pull)) is not None:
            session.end_pull(message.pull, message.num_copied)

    def _to(self, address: str, epoch: int) -> PullSession:
        if (session := self._sessions.get((address, epoch))) is None:
            session = self._sessions[address, epoch] = PullSession(
                address, epoch, self._records, self._on_answer, self._place
            )
            start_in(self._tasks, self._run(session, (address, epoch)))
        return session

    async def _run(self, session: PullSession, key: tuple[str, int]) -> None:
        """A session that broke is gone before the next pull needs one."""
        try:
            await session.run()
        finally:
            del self._sessions[key]
            address, epoch = key
            self._leave(HolderLeft(holder=Holder(address=address, epoch=epoch, num_tokens=0)))

    def _on_answer(self, pulled: Pulled) -> None:
        del self._session_of[pulled.pull]
        self._answer(pulled)


def pull_to_pb(request: PullRequest, epoch: int) -> pb.Pull:
    wanted = request.wanted
    return pb.Pull(
        pull_id=request.pull,
        epoch=epoch,
        key=wanted.key,
        namespace=wanted.owner.namespace,
        tenant=wanted.owner.tenant,
        parent=wanted.parent,
        block_hashes=wanted.hashes,
        direct=request.is_direct,
    )


def claim_of(wire: pb.Claim) -> Claim:
    """NOTE: a claim whose columns differ in length claims nothing."""
    if len(wire.block_hashes) != len(wire.generations):
        return Claim()
    return Claim(key=wire.key, hashes=list(wire.block_hashes), generations=list(wire.generations))


def places_of(wire: pb.Places) -> Places:
    return Places(handle=wire.handle, blocks=list(wire.blocks), published=wire.published)
