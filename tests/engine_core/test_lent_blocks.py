"""When an engine lends blocks of prompts that it computes, and what it does while its device
computes."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.kv import block_leases
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockSeal
from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.peer_link import LeaseRequest, Lent, PeerLink, ToLink, Wanted
from headwater.engine_core.kv.tiers import block_bytes_of
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.waits_for import WaitsFor
from tests.engine_core.pulling_pair import (
    BLOCK,
    CHUNK_BLOCKS,
    HASHES,
    KEY,
    NAMESPACE,
    PROMPT,
    AtOnce,
)
from tests.simulation.tier_faults import MODEL


class LendingEngine:
    """An engine that computes a prompt, a chunk of two blocks a step. A step takes a second, and
    two are in flight."""

    def __init__(self, *, is_direct: bool) -> None:
        config = EngineConfig(
            block_size=BLOCK,
            num_blocks=100,
            num_peer_blocks=64,
            max_model_len=99 * BLOCK,
            max_num_seqs=4,
            max_num_batched_tokens=CHUNK_BLOCKS * BLOCK,
            async_depth=2,
            shares_kv_cache=is_direct,
        )
        self._now = 0.0
        self._is_direct = is_direct
        self._sent: list[ToLink] = []
        timing = SimulatedTiming(step_seconds=1.0)
        executor = SimulatedExecutor(
            config, MODEL, timing, clock=lambda: self._now, sleep=refuse_to_wait
        )
        records = np.zeros((64, HEADER_LEN + block_bytes_of(executor)), np.uint8)
        self.engine = Engine(
            config,
            executor,
            peer_link=PeerLink(key=KEY, seal=BlockSeal(), records=records, send=self._sent.append),
        )
        sampling = SamplingParams(seed=1, max_tokens=3)
        self.engine.add(NewRequest(key=1, prompt_ids=PROMPT, output_ids=[], sampling=sampling))

    def ask(self, number: int) -> None:
        """Another engine asks for the blocks of a chunk, from 1 on. The lease has the same
        number."""
        first = (number - 1) * CHUNK_BLOCKS
        hashes = HASHES[first : first + CHUNK_BLOCKS]
        parent = HASHES[first - 1] if first else b""
        wanted = Wanted(key=KEY, owner=Owner(NAMESPACE, ""), parent=parent, hashes=hashes)
        self.engine.take(LeaseRequest(lease=number, wanted=wanted, is_direct=self._is_direct))

    def turn(self, *, at: float) -> None:
        """As many calls as it takes until there is nothing to do at that time."""
        self._now = at
        for _ in range(3):
            self.engine.step()

    @property
    def lent(self) -> list[int]:
        """Leases, as they were answered."""
        return [each.lease for each in self._sent if isinstance(each, Lent)]


def refuse_to_wait(seconds: float) -> None:
    raise AssertionError(f"it waits {seconds} s for the device")


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_leases, "ThreadLane", AtOnce)


@pytest.mark.parametrize("is_direct", [False, True])
def test_blocks_are_lent_when_their_step_has_ended_whatever_follows_it(is_direct: bool) -> None:
    owner = LendingEngine(is_direct=is_direct)
    owner.turn(at=0.0)
    owner.turn(at=1.0)
    # The first step has ended, and two others are in flight.
    for lease in (1, 2, 3):
        owner.ask(lease)
    owner.turn(at=1.0)
    assert owner.lent == [1]
    owner.turn(at=2.0)
    assert owner.lent == [1, 2]
    owner.turn(at=3.0)
    assert owner.lent == [1, 2, 3]


def test_an_engine_that_lends_does_not_wait_for_its_device() -> None:
    owner = LendingEngine(is_direct=True)
    owner.turn(at=0.0)
    # Two steps are in flight, and nobody has asked for anything.
    assert owner.engine.waits_for is WaitsFor.DEVICE
    owner.ask(1)
    owner.engine.step()
    assert owner.engine.waits_for is WaitsFor.BLOCKS, (
        "the lease wants to be looked at when its step has ended"
    )
    assert owner.lent == []
    owner.turn(at=1.0)
    assert owner.lent == [1]
    assert owner.engine.has_work()
    # The next step has ended by now: there is something to do.
    owner._now = 2.0
    assert owner.engine.waits_for is WaitsFor.NOTHING


@pytest.mark.parametrize("is_direct", [False, True])
def test_blocks_that_a_tier_has_as_well_are_lent_when_they_are_computed_again(
    is_direct: bool,
) -> None:
    """A tier that would take longer than computing is not read, and its blocks are nothing new to
    announce."""
    owner = LendingEngine(is_direct=is_direct)
    owner.engine._scheduler.blocks._pool.elsewhere = frozenset(HASHES)
    owner.turn(at=0.0)
    for lease in (1, 2):
        owner.ask(lease)
    owner.turn(at=0.5)
    assert owner.lent == []
    owner.turn(at=1.0)
    assert owner.lent == [1]
    owner.turn(at=2.0)
    assert owner.lent == [1, 2]
