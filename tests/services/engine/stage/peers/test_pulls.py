"""The pulling side between engines, with a lender that a test plays, and with a real one whose core
a test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.peer_link import (
    Claim,
    LeaseEnd,
    LeaseRequest,
    Lent,
    Placed,
    PullCopied,
    Pulled,
    PullRequest,
    Wanted,
)
from headwater.engine_core.request import Holder
from headwater.proto import blocks_pb2 as pb
from headwater.proto import blocks_pb2_grpc
from headwater.services.engine.stage.peers import leases as peer_leases
from headwater.services.engine.stage.peers import pulls as peer_pulls
from headwater.services.engine.stage.peers.leases import PeerLeases
from headwater.services.engine.stage.peers.plane import BlocksServicer
from headwater.services.engine.stage.peers.pulls import SILENT_TURNS, PeerPulls
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.tasks import owned_task

KEY = b"k" * 16
HASH = b"h" * 16
CLAIM = pb.Claim(key=KEY, block_hashes=[HASH], generations=[1])


class Lender(blocks_pb2_grpc.BlocksServicer):
    """Says where blocks lie, or nothing at all, and nothing more until it hears that they are
    copied. Notes each frame that it gets."""

    def __init__(self, received: asyncio.Queue[object], *, is_silent: bool = False) -> None:
        self._received = received
        self._is_silent = is_silent

    async def Pull(
        self, frames: AsyncIterator[pb.PullFrame], context: Any
    ) -> AsyncIterator[pb.BlockFrame]:
        async for frame in frames:
            self._received.put_nowait(frame)
            for pull in frame.pulls if not self._is_silent else ():
                yield pb.BlockFrame(
                    pull_id=pull.pull_id, before=CLAIM, places=pb.Places(handle=b"here", blocks=[7])
                )
            for number in frame.copied:
                yield pb.BlockFrame(pull_id=number, after=CLAIM)


class HeardLender(BlocksServicer):
    """The lending side of an engine. Notes each frame that it gets."""

    def __init__(self, leases: PeerLeases, received: asyncio.Queue[object]) -> None:
        super().__init__(leases)
        self._received = received

    async def Pull(
        self, frames: AsyncIterator[pb.PullFrame], context: Any
    ) -> AsyncIterator[pb.BlockFrame]:
        async for frame in super().Pull(self._noted(frames), context):
            yield frame

    async def _noted(self, frames: AsyncIterator[pb.PullFrame]) -> AsyncIterator[pb.PullFrame]:
        async for frame in frames:
            self._received.put_nowait(frame)
            yield frame


class Puller:
    """The pulling side, with a lender. `said` has each frame that the lender gets, and each answer
    to the core."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[object] = asyncio.Queue()
        self.placed: asyncio.Queue[Placed] = asyncio.Queue()
        records = np.zeros((1, 1), np.uint8)
        self.pulls = PeerPulls(
            records,
            answer=self.sent.put_nowait,
            place=self.placed.put_nowait,
            leave=lambda left: None,
        )

    @contextlib.asynccontextmanager
    async def asking(self, lender: blocks_pb2_grpc.BlocksServicer) -> AsyncIterator[None]:
        """Scope of a direct pull from the lender."""
        listener = Listener("127.0.0.1", 0)
        blocks_pb2_grpc.add_BlocksServicer_to_server(lender, listener.server)
        await listener.start()
        holder = Holder(address=listener.address, epoch=1, num_tokens=16)
        wanted = Wanted(key=KEY, owner=Owner(b"n" * 16), parent=b"", hashes=[HASH])
        self.pulls.pull(PullRequest(pull=1, holder=holder, wanted=wanted, rows=[], is_direct=True))
        try:
            async with asyncio.timeout(60):
                yield
        finally:
            await self.pulls.close()
            await listener.server.stop(None)

    async def answer(self) -> Pulled:
        while not isinstance(answer := await self.sent.get(), Pulled):
            pass
        return answer


@pytest.fixture(autouse=True)
def _signs_of_life_come_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pulls, "LIFE_SECONDS", 0.05)


async def test_an_engine_whose_blocks_are_being_copied_is_not_taken_for_silent() -> None:
    puller = Puller()
    async with puller.asking(Lender(puller.sent)):
        assert (await puller.placed.get()).places.blocks == [7]
        # The copy goes on for longer than a silent engine is waited for.
        received = [await puller.sent.get() for _ in range(4 * SILENT_TURNS)]
        assert not any(isinstance(each, Pulled) for each in received)
        puller.pulls.copied(PullCopied(pull=1))
        answer = await puller.answer()
        assert (answer.before.hashes, answer.after.hashes) == ([HASH], [HASH])


async def test_an_engine_that_owes_an_answer_and_says_nothing_is_given_up() -> None:
    puller = Puller()
    async with puller.asking(Lender(puller.sent, is_silent=True)):
        assert (await puller.answer()).after.hashes == []


class Lending:
    """The lending side of an engine whose core does not answer by itself."""

    def __init__(self, *, may_be_in_step: bool) -> None:
        self.asked = asyncio.Queue[LeaseRequest]()
        self.ended = asyncio.Queue[LeaseEnd]()
        self.leases = PeerLeases(
            1,
            np.zeros((1, 1), np.uint8),
            lend=self.asked.put_nowait,
            copied=lambda copied: None,
            end=self.ended.put_nowait,
            may_be_in_step=lambda: may_be_in_step,
        )

    @contextlib.asynccontextmanager
    async def asked_by(self, puller: Puller) -> AsyncIterator[int]:
        """Scope of a lease that the puller has asked for; its number."""
        async with (
            owned_task(self.leases.watch()),
            puller.asking(HeardLender(self.leases, puller.sent)),
        ):
            yield (await self.asked.get()).lease


async def test_an_engine_whose_core_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_leases, "SIGN_SECONDS", 0.01)
    puller = Puller()
    lending = Lending(may_be_in_step=False)
    async with lending.asked_by(puller) as lease:
        assert (await puller.answer()).after.hashes == []
        assert (await lending.ended.get()).lease == lease


async def test_an_engine_in_a_long_step_is_not_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_leases, "SIGN_SECONDS", 0.01)
    puller = Puller()
    lending = Lending(may_be_in_step=True)
    async with lending.asked_by(puller) as lease:
        # The core hears of it once its step has ended, later than a silent engine is waited for.
        received = [await puller.sent.get() for _ in range(4 * SILENT_TURNS)]
        assert not any(isinstance(each, Pulled) for each in received)
        claim = Claim(key=KEY, hashes=[HASH], generations=[1])
        lending.leases.on_lent(Lent(lease=lease, rows=[], before=claim, after=claim))
        assert (await puller.answer()).after == claim
        assert (await lending.ended.get()).lease == lease
