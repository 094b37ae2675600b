"""The engine-to-engine plane: connects the core with other engines, which lend it blocks and borrow
blocks from it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from headwater.proto import blocks_pb2 as pb
from headwater.proto import blocks_pb2_grpc

from ....runtime.tasks import owned_task
from ...core.messages import (
    BlocksLent,
    BlocksPlaced,
    BlocksPulled,
    Command,
    CopiedLease,
    CopiedPull,
    EndLease,
    EndPull,
    HolderGone,
    LendBlocks,
    PullBlocks,
    ToPeers,
)
from ...core.peer_records import UInt8Array
from .leases import PeerLeases
from .pulls import PeerPulls

Context = grpc.aio.ServicerContext[Any, Any]


class Core(Protocol):
    """Methods of `CoreClient` that the plane uses."""

    @property
    def may_be_in_step(self) -> bool: ...
    def send(self, command: Command) -> None: ...


class PeerPlane:
    """Use within `running`."""

    def __init__(self, core: Core, epoch: int, records: UInt8Array) -> None:
        self.pulls = PeerPulls(
            records,
            answer=lambda pulled: core.send(BlocksPulled(pulled)),
            place=lambda placed: core.send(BlocksPlaced(placed)),
            leave=lambda left: core.send(HolderGone(left)),
        )
        self.leases = PeerLeases(
            epoch,
            records,
            lend=lambda request: core.send(LendBlocks(request)),
            copied=lambda copied: core.send(CopiedLease(copied)),
            end=lambda end: core.send(EndLease(end)),
            may_be_in_step=lambda: core.may_be_in_step,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[PeerPlane]:
        """Leaving the scope answers every pull that is open."""
        async with owned_task(self.leases.watch()):
            try:
                yield self
            finally:
                await self.pulls.close()

    def on_report(self, report: ToPeers) -> None:
        """Takes a message of the core to other engines."""
        match report:
            case PullBlocks(message):
                self.pulls.pull(message)
            case EndPull(message):
                self.pulls.end_pull(message)
            case CopiedPull(message):
                self.pulls.copied(message)
            case BlocksLent(message):
                self.leases.on_lent(message)


class BlocksServicer(blocks_pb2_grpc.BlocksServicer):
    """The plane's gRPC method."""

    def __init__(self, leases: PeerLeases) -> None:
        self._leases = leases

    async def Pull(
        self, frames: AsyncIterator[pb.PullFrame], context: Context
    ) -> AsyncIterator[pb.BlockFrame]:
        with self._leases.session() as session:
            # A connection that breaks while a frame is being written does not resume this
            # generator.
            context.add_done_callback(lambda _: session.end())  # type: ignore[arg-type]
            async for frame in session.run(frames):
                yield frame
