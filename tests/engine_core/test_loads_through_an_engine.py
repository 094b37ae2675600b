"""Loads from block sources through an engine: which requests wait, what is computed instead, what
stays held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.kv.block_source import BlockSource, Outcome, Ticket
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.waits_for import WaitsFor
from tests.engine_core.driven_engine import DrivenEngine
from tests.engine_core.lying_source import ScriptedSource

BLOCK_SIZE = 16


MODEL = SimulatedModel(vocab_size=1000)
CONFIG = EngineConfig(
    num_blocks=17,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=BLOCK_SIZE,
)
FORGOTTEN = 300
"""First token of a prompt that the cache has forgotten and the source holds."""


class Served(DrivenEngine):
    """An engine whose source holds the blocks of a prompt that the cache has forgotten."""

    def __init__(self, config: EngineConfig = CONFIG, *, prefill_seconds: float = 0.0) -> None:
        self.now = 0.0
        timing = SimulatedTiming(seconds_per_prefill_token=prefill_seconds)
        executor = SimulatedExecutor(
            config, MODEL, timing, verify_every=1, clock=lambda: self.now, sleep=self._sleep
        )
        self.source = ScriptedSource(executor._cache.blocks, seconds_per_block=0.5)
        sources: list[BlockSource] = [self.source]
        super().__init__(Engine(config, executor, clock=lambda: self.now, sources=sources))
        for key, first_token in ((0, FORGOTTEN), (100, 600), (101, 50)):
            self.add(key, first_token)
            self.run()

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def add(self, key: int, first_token: int, *, credit: int = 1 << 30) -> None:
        self.tokens[key] = []
        sampling = SamplingParams(seed=key, max_tokens=8)
        prompt_ids = prompt(first_token)
        self.engine.add(
            NewRequest(
                key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling, credit=credit
            )
        )

    def load_of(self, key: int) -> Ticket:
        """Adds a request for the forgotten prompt; the load that it waits for."""
        self.add(key, FORGOTTEN)
        self.step()
        (ticket,) = self.source.open
        return ticket

    def check(self, *keys: int) -> None:
        """All was answered as if there were no source, and nothing is held."""
        for key in keys:
            sampling = SamplingParams(seed=key, max_tokens=8)
            assert self.tokens[key] == expected_tokens(MODEL, prompt(FORGOTTEN), sampling)
        load = self.engine.load()
        assert (
            load.num_used_blocks,
            load.num_waiting,
            load.num_running,
            load.num_prefill_tokens,
        ) == (0, 0, 0, 0)


def prompt(first_token: int) -> list[int]:
    return [(first_token + 7 * i) % 1000 for i in range(200)]


def test_a_source_beside_host_memory_serves_a_prompt_that_the_cache_forgot() -> None:
    served = Served()
    served.source.end(served.load_of(2))
    served.run()
    served.check(2)
    assert served.cached[2] == 192


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_what_a_source_does_not_load_is_computed_and_it_is_not_asked_again(
    outcome: Outcome,
) -> None:
    served = Served()
    served.source.end(served.load_of(2), outcome)
    served.step()
    assert served.engine.load().num_prefill_tokens == 200
    served.run()
    served.check(2)
    assert (served.cached[2], served.source.open) == (0, [])


def test_behind_blocks_that_were_loaded_the_rest_is_computed() -> None:
    served = Served()
    ticket = served.load_of(2)
    served.source.end(ticket, Outcome.LOADED, ticket.hashes[:5])
    served.run()
    served.check(2)
    assert (served.cached[2], served.source.open) == (80, [])


def test_blocks_of_another_prompt_are_not_used() -> None:
    served = Served()
    ticket = served.load_of(2)
    others = [block_hash for block_hash in served.source.held if block_hash not in ticket.hashes]
    served.source.end(ticket, Outcome.LOADED, others[:12])
    served.run()
    served.check(2)
    assert served.cached[2] == 0


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_request_that_comes_meanwhile_waits_for_the_same_load(outcome: Outcome) -> None:
    served = Served()
    ticket = served.load_of(2)
    served.add(3, FORGOTTEN)
    for _ in range(5):
        served.step()
    assert served.source.open == [ticket]
    served.source.end(ticket, outcome)
    served.run()
    served.check(2, 3)
    # Where it was not loaded, one computes it and the other follows.
    assert served.cached == served.cached | {2: 192 if outcome is Outcome.LOADED else 0, 3: 192}


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_request_that_is_aborted_meanwhile_leaves_nothing_held(outcome: Outcome) -> None:
    served = Served()
    ticket = served.load_of(2)
    served.engine.cancel(2)
    served.step()
    assert served.engine.has_work(), "the load has blocks until it ends"
    assert (served.engine.load().num_used_blocks, served.source.cancelled) == (12, [])
    served.source.end(ticket, outcome)
    served.run()
    served.check()
    assert served.tokens[2] == []
    # What came is there for the next.
    served.add(3, FORGOTTEN)
    served.step()
    assert (served.source.open == []) is (outcome is Outcome.LOADED)


def test_a_request_does_not_wait_for_a_source_that_never_answers() -> None:
    served = Served(replace(CONFIG, num_blocks=40))
    for first_token in (101, 900):
        served.add(first_token, first_token)
        served.run()
    ticket = served.load_of(2)
    for _ in range(20):
        served.step()
    assert (served.tokens[2], served.engine.waits_for) == ([], WaitsFor.BLOCKS)
    served.now += 10 * 0.5 * 12
    for _ in range(20):
        served.step()
    assert (served.source.cancelled, served.cached[2], len(served.tokens[2])) == ([ticket], 0, 8)
    assert served.engine.load().num_used_blocks == 12, "the source may still write there"
    served.source.end(ticket)
    served.run()
    served.check(2)


def test_loads_under_way_neither_stop_nor_take_blocks_of_what_runs() -> None:
    """The cache has 16 blocks, of which the load has 12: the other request has to wait for blocks,
    and gets them."""
    served = Served()
    ticket = served.load_of(2)
    served.add(3, FORGOTTEN + 1)
    for _ in range(5):
        served.step()
    assert (served.tokens[3], served.engine.load().num_preemptions) == ([], 0)
    served.source.end(ticket, Outcome.FAILED)
    served.run()
    served.check(2)
    assert len(served.tokens[3]) == 8


def test_a_request_that_lacks_blocks_goes_on_when_a_load_that_was_given_up_ends() -> None:
    """The engine once said that it had no work."""
    served = Served()
    ticket = served.load_of(2)
    served.now += 10 * 0.5 * 12
    for _ in range(5):
        served.step()
    assert (served.source.cancelled, served.tokens[2]) == ([ticket], []), (
        "the load still has 12 blocks of 16"
    )
    served.source.end(ticket, Outcome.CANCELLED)
    served.run()
    served.check(2)


def test_a_request_that_was_preempted_asks_a_source_again_that_failed_it() -> None:
    served = Served()
    served.add(2, FORGOTTEN, credit=4)
    served.step()
    served.source.end(served.source.open[0], Outcome.FAILED)
    served.run()
    assert len(served.tokens[2]) == 4
    # Its reader takes nothing, and another prompt takes its blocks.
    served.engine.stall(2)
    served.add(3, 600)
    for _ in range(3):
        served.step()
    # The source holds what the other prompt had before, too.
    served.source.end(served.source.open[0])
    served.run()
    assert (len(served.tokens[3]), served.engine.load().num_preemptions, served.source.open) == (
        8,
        1,
        [],
    )
    served.engine.add_credit(2, 100)
    served.step()
    (ticket,) = served.source.open
    served.source.end(ticket)
    served.run()
    served.check(2)


def test_an_executor_that_computes_faster_than_a_source_loads_is_not_kept_waiting() -> None:
    served = Served(prefill_seconds=0.01)
    served.add(2, FORGOTTEN)
    served.run()
    served.check(2)
    assert served.cached[2] == 0
    slow = Served(prefill_seconds=0.1)
    slow.source.end(slow.load_of(2))
    slow.run()
    assert slow.cached[2] == 192


def test_an_engine_that_is_closed_cancels_its_loads() -> None:
    served = Served()
    ticket = served.load_of(2)
    served.engine.close()
    assert (served.source.cancelled, served.source.is_closed) == ([ticket], True)
