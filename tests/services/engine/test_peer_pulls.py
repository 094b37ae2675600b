"""The pulling side between engines, with a lender that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.peer_link import Placed, PullCopied, Pulled, PullRequest, Wanted
from headwater.engine_core.request import Holder
from headwater.proto import blocks_pb2 as pb
from headwater.proto import blocks_pb2_grpc
from headwater.services.engine import peer_pulls
from headwater.services.engine.peer_pulls import SILENT_TURNS, PeerPulls
from headwater.services.runtime.listener import Listener

KEY, HASH = b"k" * 16, b"h" * 16
CLAIM = pb.Claim(key=KEY, block_hashes=[HASH], generations=[1])


class Lender(blocks_pb2_grpc.BlocksServicer):
    """Says where blocks lie, or nothing at all, and nothing more until it hears that they are copied. Notes each frame
    that it gets."""

    def __init__(self, heard: asyncio.Queue[object], *, is_silent: bool) -> None:
        self._heard, self._is_silent = heard, is_silent

    async def Pull(self, frames: AsyncIterator[pb.PullFrame], context: Any) -> AsyncIterator[pb.BlockFrame]:
        async for frame in frames:
            self._heard.put_nowait(frame)
            for pull in frame.pulls if not self._is_silent else ():
                yield pb.BlockFrame(pull_id=pull.pull_id, before=CLAIM, places=pb.Places(handle=b"here", blocks=[7]))
            for number in frame.copied:
                yield pb.BlockFrame(pull_id=number, after=CLAIM)


class Puller:
    """The pulling side, with a lender. `said` has each frame that the lender gets, and each answer to the core."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[object] = asyncio.Queue()
        self.placed: asyncio.Queue[Placed] = asyncio.Queue()
        records = np.zeros((1, 1), np.uint8)
        self.pulls = PeerPulls(
            records, answer=self.said.put_nowait, place=self.placed.put_nowait, leave=lambda left: None
        )

    @contextlib.asynccontextmanager
    async def asking(self, *, is_silent: bool = False) -> AsyncIterator[None]:
        """Scope of a direct pull from the lender."""
        listener = Listener("127.0.0.1", 0)
        blocks_pb2_grpc.add_BlocksServicer_to_server(Lender(self.said, is_silent=is_silent), listener.server)
        await listener.start()
        holder = Holder(address=listener.address, epoch=1, num_tokens=16)
        wanted = Wanted(key=KEY, owner=Owner(b"n" * 16), parent=b"", hashes=[HASH])
        self.pulls.pull(PullRequest(pull=1, holder=holder, wanted=wanted, rows=[], is_direct=True))
        try:
            async with asyncio.timeout(30):
                yield
        finally:
            await self.pulls.close()
            await listener.server.stop(None)

    async def answer(self) -> Pulled:
        while not isinstance(answer := await self.said.get(), Pulled):
            pass
        return answer


@pytest.fixture(autouse=True)
def _signs_of_life_come_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pulls, "LIFE_SECONDS", 0.01)


async def test_an_engine_whose_blocks_are_being_copied_is_not_taken_for_silent() -> None:
    puller = Puller()
    async with puller.asking():
        assert (await puller.placed.get()).places.blocks == [7]
        # The copy goes on for longer than a silent engine is waited for.
        heard = [await puller.said.get() for _ in range(4 * SILENT_TURNS)]
        assert not any(isinstance(each, Pulled) for each in heard)
        puller.pulls.copied(PullCopied(pull=1))
        answer = await puller.answer()
        assert (answer.before.hashes, answer.after.hashes) == ([HASH], [HASH])


async def test_an_engine_that_owes_an_answer_and_says_nothing_is_given_up() -> None:
    puller = Puller()
    async with puller.asking(is_silent=True):
        assert (await puller.answer()).after.hashes == []
