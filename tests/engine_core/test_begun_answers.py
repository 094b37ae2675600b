"""How long an answer that comes from another engine, where its first tokens were read, waits among
prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.kv import block_leases
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockSeal
from headwater.engine_core.kv.peer_link import PeerLink
from headwater.engine_core.kv.tiers import block_bytes_of
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.seating.prefill_budget import (
    BEGUN_STRETCH,
    BESIDE_BEGUN_SECONDS,
)
from headwater.engine_core.waits_for import WaitsFor
from tests.engine_core.pulling_pair import KEY, AtOnce

MODEL = SimulatedModel(vocab_size=1000)
STEP_SECONDS = 0.01
TOKEN_SECONDS = 0.001
CHUNK = 256
POLL_SECONDS = 0.0002
KNOWN = 600
PROMPT = 900


class RecordingExecutor(SimulatedExecutor):
    """Keeps the plans and when each was made."""

    def __init__(self, config: EngineConfig, loop: Loop) -> None:
        timing = SimulatedTiming(step_seconds=STEP_SECONDS, seconds_per_prefill_token=TOKEN_SECONDS)
        super().__init__(config, MODEL, timing, clock=lambda: loop.now, sleep=loop.sleep)
        self.plans: list[tuple[float, StepPlan]] = []

    def submit(self, plan: StepPlan) -> int:
        self.plans.append((self._clock(), plan))
        return super().submit(plan)


@dataclass
class Loop:
    """An engine in virtual time, called as an engine's process calls it."""

    lends: bool
    """Whether it lends blocks to other engines, as engines do to which answers move."""
    now: float = 0.0
    first_tokens: dict[int, float] = field(default_factory=dict)
    """When each request got its first token here."""

    def __post_init__(self) -> None:
        config = EngineConfig(
            num_blocks=4000,
            max_model_len=2048,
            max_num_seqs=32,
            max_num_batched_tokens=CHUNK,
            num_peer_blocks=64 if self.lends else 0,
        )
        self.executor = RecordingExecutor(config, self)
        link = None
        if self.lends:
            records = np.zeros((64, HEADER_LEN + block_bytes_of(self.executor)), np.uint8)
            link = PeerLink(key=KEY, seal=BlockSeal(), records=records, send=lambda message: None)
        self.engine = Engine(config, self.executor, clock=lambda: self.now, peer_link=link)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add(self, key: int, num_prompt: int, num_known: int = 0) -> None:
        rng = np.random.default_rng(key)
        prompt_ids = rng.integers(10, 900, num_prompt).tolist()
        output_ids = rng.integers(10, 900, num_known).tolist()
        sampling = SamplingParams(seed=1, max_tokens=num_known + 4)
        self.engine.add(
            NewRequest(key=key, prompt_ids=prompt_ids, output_ids=output_ids, sampling=sampling)
        )

    def run(self, *, until: float) -> None:
        while self.now < until and self.engine.has_work():
            if self.engine.waits_for is not WaitsFor.NOTHING:
                self.now += POLL_SECONDS
                if self.engine.waits_for is WaitsFor.DEVICE:
                    continue
            if (output := self.engine.step()) is not None:
                for key in output.keys:
                    self.first_tokens.setdefault(key, self.now)


def waits() -> list[float]:
    """Seconds that answers waited for their next token, which came one by one at any point of the
    steps of an engine that always has prompts to compute."""
    loop = Loop(lends=True)
    found = []
    for number in range(24):
        loop.add(2 * number, 2 * PROMPT)
        loop.add(2 * number + 1, 2 * PROMPT)
        loop.run(until=loop.now + 0.6 + 0.024 * number)
        came = loop.now
        key = 1000 + number
        loop.add(key, KNOWN, 20)
        while key not in loop.first_tokens:
            loop.run(until=loop.now + 0.001)
        found.append(loop.first_tokens[key] - came)
        loop.run(until=loop.now + 10.0)
    return found


@pytest.fixture(autouse=True)
def _copies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_leases, "ThreadLane", AtOnce)


@pytest.mark.long
def test_an_answer_that_has_begun_waits_for_the_steps_in_flight_and_hardly_more() -> None:
    step = STEP_SECONDS + CHUNK * TOKEN_SECONDS
    # Its known tokens take three steps; beside the last ones, others are computed for a while.
    computed = 3 * STEP_SECONDS + (KNOWN + 20) * TOKEN_SECONDS + BESIDE_BEGUN_SECONDS
    # The step that runs, and the one that is planned behind it.
    assert max(waits()) < computed + 2 * step + 0.01


def test_other_prompts_are_computed_for_a_bounded_time_beside_it() -> None:
    loop = Loop(lends=False)
    loop.add(1, PROMPT)
    loop.run(until=0.001)
    num_planned = len(loop.executor.plans)
    loop.add(2, KNOWN, 20)
    loop.run(until=10.0)
    counts = [plan.counts.tolist() for _, plan in loop.executor.plans[num_planned:]]
    first = next(i for i, each in enumerate(counts) if each == [CHUNK])
    num_beside = int(BESIDE_BEGUN_SECONDS / TOKEN_SECONDS)
    assert sorted(counts[first + 2]) == [num_beside, KNOWN + 20 - 2 * CHUNK]
    assert CHUNK - 2 < max(counts[first + 3]) < CHUNK, "afterwards they get what the step has"


def test_the_first_of_several_resumed_requests_is_not_delayed_and_one_that_lacks_little_does_not_wait() -> (
    None
):
    loop = Loop(lends=True)
    loop.add(1, PROMPT)
    loop.run(until=0.001)
    came = loop.now
    loop.add(2, KNOWN, 20)
    loop.add(3, KNOWN, 20)
    loop.run(until=0.4)
    loop.add(4, 30, 5)
    loop.run(until=100.0)
    step = STEP_SECONDS + CHUNK * TOKEN_SECONDS
    of_one = (KNOWN + 20) * TOKEN_SECONDS
    first, second, short = (loop.first_tokens[key] - came for key in (2, 3, 4))
    # Two steps are in flight. Others are computed beside each of its own, for no longer than they
    # may be.
    in_flight = 2 * step
    assert first < in_flight + of_one + 4 * (STEP_SECONDS + BESIDE_BEGUN_SECONDS)
    assert short <= first
    assert second < in_flight + 2 * of_one + 10 * (STEP_SECONDS + BESIDE_BEGUN_SECONDS)
    assert loop.first_tokens[1] > loop.first_tokens[3]


def test_other_prompts_get_on_beside_answers_that_keep_coming() -> None:
    loop = Loop(lends=True)
    loop.add(1, PROMPT)
    for key in range(2, 200):
        loop.add(key, 40, 20)
        loop.run(until=loop.now + 0.15)
        if 1 in loop.first_tokens:
            break
    num_steps = PROMPT / (BESIDE_BEGUN_SECONDS / TOKEN_SECONDS)
    assert loop.first_tokens[1] < num_steps * 0.15


@pytest.mark.parametrize("lends", [True, False])
def test_prompts_alone_take_as_long_as_before(lends: bool) -> None:
    """An engine that lends plans the same steps, and its device does not wait for any."""
    loop = Loop(lends)
    for key in range(8):
        loop.add(key, PROMPT)
    loop.run(until=100.0)
    num_steps = len(loop.executor.plans)
    num_decoded = sum(int(plan.counts[plan.counts == 1].sum()) for _, plan in loop.executor.plans)
    assert num_decoded == 8 * 3
    busy = num_steps * STEP_SECONDS + 8 * PROMPT * TOKEN_SECONDS
    assert loop.now == pytest.approx(busy, rel=0.01)
    assert loop.executor.plans[0][1].counts.tolist() == [CHUNK]


def test_nothing_is_bounded_while_the_time_of_a_token_is_unknown() -> None:
    loop = Loop(lends=True)
    loop.executor.prefill_seconds = 0.0
    loop.add(1, PROMPT)
    loop.add(2, 40, 20)
    loop.run(until=0.001)
    assert [plan.counts.tolist() for _, plan in loop.executor.plans[:1]] == [[60, CHUNK - 60]]


def test_the_resumed_request_that_lacks_least_goes_first() -> None:
    """As after the death of an engine: two answers are computed whole, of the others little more is
    missing than may be computed beside them."""
    loop = Loop(lends=True)
    lacking = {1: 806, 2: 810, 3: 57, 4: 75}
    for key, num_tokens in lacking.items():
        loop.add(key, num_tokens - 20, 20)
        loop.run(until=loop.now + 0.005)
    loop.run(until=100.0)
    step = STEP_SECONDS + CHUNK * TOKEN_SECONDS
    for key, num_tokens in lacking.items():
        before = sum(each for each in lacking.values() if each <= num_tokens)
        num_steps = 2 + before // CHUNK
        # The steps in flight when it comes, and what others are given in the step that ends its
        # computation.
        limit = 2 * step + before * TOKEN_SECONDS
        limit += num_steps * (STEP_SECONDS + BESIDE_BEGUN_SECONDS)
        assert loop.first_tokens[key] < limit, key
    assert loop.first_tokens[3] < loop.first_tokens[4] < loop.first_tokens[1] < loop.first_tokens[2]


def test_a_request_that_lacks_much_is_not_overtaken_for_ever() -> None:
    loop = Loop(lends=True)
    loop.add(1, 3 * KNOWN, 20)
    seconds = (3 * KNOWN + 20) * TOKEN_SECONDS
    for key in range(2, 200):
        # As much as the engine computes in the meantime.
        loop.add(key, 180, 20)
        loop.run(until=loop.now + 0.2)
        if 1 in loop.first_tokens:
            break
    assert BEGUN_STRETCH * seconds < loop.first_tokens[1] < (BEGUN_STRETCH + 2) * seconds
