"""Seats and prompt tokens among tenants: by weight while several want them, all to one who is
alone."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.seating.tenant_shares import (
    CLAIM_SECONDS,
    TenantShares,
    split,
)

WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 7.0])


@given(
    st.integers(0, 500),
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 200), WEIGHTS)),
)
def test_a_split_wastes_nothing_and_tenants_that_want_more_get_their_weight(
    budget: int, wants: dict[str, tuple[int, float]]
) -> None:
    demands = {name: demand for name, (demand, _) in wants.items()}
    parts = split(budget, demands, lambda name: wants[name][1])
    assert sum(parts.values()) == min(budget, sum(demands.values()))
    for name, part in parts.items():
        assert 0 <= part <= demands[name]
        # A part is whole tokens: two tenants may be a token of the heavier one apart, for each
        # rounding.
        if part < demands[name]:
            level = (part + len(parts)) / wants[name][1]
            assert all(
                level >= (parts[other] - len(parts)) / wants[other][1] - 1e-9 for other in parts
            )


class Bench:
    """An engine in virtual time, with streams that are counted by tenant."""

    def __init__(
        self,
        num_seats: int = 8,
        *,
        budget: int = 512,
        num_blocks: int = 2000,
        depth: int = 2,
        step_seconds: float = 1.0,
        spare_rows: int = 0,
    ) -> None:
        self.now = 0.0
        self.num_added = 0
        self.step_seconds = step_seconds
        self.config = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=1024,
            max_num_seqs=num_seats,
            spare_rows=spare_rows,
            max_num_batched_tokens=budget,
            async_depth=depth,
            policy="fair",
        )
        executor = SimulatedExecutor(
            self.config, SimulatedModel(vocab_size=1000), SimulatedTiming(late_polls=1 << 30)
        )
        self.engine = Engine(self.config, executor, clock=lambda: self.now)
        self.tenants: dict[int, str] = {}
        self.tokens = Counter[str]()
        self.first_step = dict[int, int]()
        self.num_steps = 0
        self.open: Counter[str] = Counter()

    def add(
        self,
        tenant: str,
        *,
        prompt_len: int = 20,
        answer_len: int = 30,
        weight: float = 1.0,
        time: float = 0.0,
    ) -> int:
        key = self.num_added
        self.num_added += 1
        self.tenants[key] = tenant
        self.open[tenant] += 1
        prompt = [(key * 31 + i) % 900 + 3 for i in range(prompt_len)]
        sampling = SamplingParams(max_tokens=answer_len)
        self.engine.add(
            NewRequest(
                key=key,
                prompt_ids=prompt,
                output_ids=[],
                sampling=sampling,
                tenant=tenant,
                weight=weight,
                virtual_time=time,
            )
        )
        return key

    def step(self) -> None:
        self.now += self.step_seconds
        self.num_steps += 1
        output = self.engine.step()
        if output is None:
            return
        for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
            self.tokens[self.tenants[key]] += num_tokens
            self.first_step.setdefault(key, self.num_steps)
        for finish in output.finishes:
            self.open[self.tenants[finish.key]] -= 1

    def steps_to_first_token(self, key: int) -> int:
        begin = self.num_steps
        while key not in self.first_step:
            self.step()
        return self.first_step[key] - begin

    def seats(self) -> Counter[str]:
        return Counter(request.tenant for request in self.engine._scheduler.rows.running.values())


def test_a_tenant_alone_takes_every_seat_again_when_the_others_have_been_gone_for_a_while() -> None:
    bench = Bench()
    for _ in range(40):
        bench.add("abuser", answer_len=100)
    bench.step()
    assert bench.seats() == {"abuser": 8}
    bench.add("ada", answer_len=2)
    while bench.open["ada"]:
        bench.step()
    bench.step()
    assert bench.seats() == {"abuser": 7}, "one is kept for who comes next"
    for _ in range(int(CLAIM_SECONDS) + 1):
        bench.step()
    assert bench.seats() == {"abuser": 8}


@pytest.mark.parametrize("spare_rows", [0, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_tenant_that_arrives_beside_an_abuser_starts_at_once(depth: int, spare_rows: int) -> None:
    bench = Bench(depth=depth, spare_rows=spare_rows)
    alone = bench.steps_to_first_token(bench.add("ada"))
    for _ in range(100):
        bench.add("abuser", answer_len=500)
    for _ in range(5):
        bench.step()
    # With the virtual time at which the abuser stands, as gateways lift who comes back.
    bench.add("eve", answer_len=400, time=9.0)
    waits = [
        bench.steps_to_first_token(bench.add(name, answer_len=400, time=9.0))
        for name in ("bob", "ada", "fay")
    ]
    # The first takes the seat that is kept; the others that of an abuser's request, when no step in
    # flight lists it, or at once where there are rows to spare.
    assert max(waits) <= alone + (1 if spare_rows else 2 * depth)
    assert not spare_rows or waits[1:] == [alone, alone]
    assert bench.seats()["abuser"] in (3, 4), "one may be free again"


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_seats", [8, 32])
def test_all_requests_of_one_step_beside_an_abuser_start_in_the_next(
    num_seats: int, depth: int
) -> None:
    bench = Bench(num_seats, depth=depth, spare_rows=8)
    alone = bench.steps_to_first_token(bench.add("ada"))
    for _ in range(100):
        bench.add("abuser", answer_len=500)
    for _ in range(5):
        bench.step()
    keys = [bench.add(name, time=9.0) for name in ("ada", "bob", "eve")]
    assert [bench.steps_to_first_token(key) for key in keys] == [alone, 0, 0], (
        "fewer seats are kept than come"
    )


@pytest.mark.parametrize(
    "weights", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 2.0, "c": 5.0}]
)
def test_tenants_that_want_more_than_there_is_get_it_by_weight(weights: dict[str, float]) -> None:
    bench = Bench(num_seats=16)
    for name, weight in weights.items():
        for _ in range(60 if name == "a" else 20):
            bench.add(name, weight=weight)
    for _ in range(150):
        bench.step()
        for name, weight in weights.items():
            while bench.open[name] < 20:
                bench.add(name, weight=weight)
    level = {name: bench.tokens[name] / weight for name, weight in weights.items()}
    mean = sum(bench.tokens.values()) / sum(weights.values())
    assert all(0.8 * mean <= each <= 1.25 * mean for each in level.values()), level


def test_long_prompts_of_one_do_not_keep_out_another_s() -> None:
    bench = Bench(budget=128)
    for i in range(6):
        bench.add("abuser", prompt_len=1000, answer_len=4, time=1000.0 * i)
    for _ in range(10):
        bench.step()
    assert bench.seats() == {"abuser": 2}
    ada = bench.add("ada", prompt_len=100, time=1000.0)
    assert bench.steps_to_first_token(ada) <= 5, "of about fifty"


def test_requests_run_on_seats_alone_however_many_rows_are_to_spare() -> None:
    bench = Bench(num_seats=4, spare_rows=3)
    for i in range(40):
        bench.add("ada", answer_len=2 + i % 7)
    while any(bench.open.values()):
        bench.step()
        assert sum(bench.seats().values()) <= 4
    assert bench.tokens["ada"] == sum(2 + i % 7 for i in range(40))
    assert bench.engine.load().num_used_blocks == 0


def test_the_tenant_with_most_blocks_yields_them() -> None:
    bench = Bench(num_blocks=200)
    for _ in range(8):
        bench.add("abuser", prompt_len=600, answer_len=300)
    for _ in range(12):
        bench.step()
    assert bench.seats() == {"abuser": 5}, "there are blocks for no more"
    assert bench.steps_to_first_token(bench.add("ada", prompt_len=900, answer_len=4)) <= 8


@pytest.mark.long
def test_beside_an_abuser_nine_others_wait_no_longer_for_a_first_token_than_alone() -> None:
    """Steps of 20 ms, with prompts that come at random; virtual times as gateways give them."""
    alone, beside = (_waits(num_abusing, seed=3) for num_abusing in (0, 100))
    assert len(alone) == len(beside) > 100
    assert np.percentile(beside, 99) <= 1.3 * np.percentile(alone, 99)


def _waits(num_abusing: int, seed: int, cost: float = 96.0) -> list[int]:
    """Steps to the first tokens of all but the abuser's requests."""
    bench = Bench(num_seats=32, step_seconds=0.02)
    dice = random.Random(seed)
    now = 0.0
    times = defaultdict[str, float](float)
    begun = dict[int, int]()
    starts = dict[int, float]()

    def ask(tenant: str) -> None:
        times[tenant] = max(times[tenant], now)
        key = bench.add(tenant, prompt_len=64, answer_len=16, time=times[tenant])
        begun[key] = bench.num_steps
        starts[key] = times[tenant]
        times[tenant] += cost

    for _ in range(800):
        for name in "abcdefghi":
            if dice.random() < 0.02:
                ask(name)
        while bench.open["abuser"] < num_abusing:
            ask("abuser")
        bench.step()
        now = max((starts.pop(key) for key in bench.first_step.keys() & starts.keys()), default=now)
    return [
        step - begun[key]
        for key, step in bench.first_step.items()
        if bench.tenants[key] != "abuser"
    ]


def test_all_of_many_tenants_are_reported_in_turn() -> None:
    shares = TenantShares(8, 100, lambda: 0.0)
    for name in "abcde":
        shares.enter(name, 1.0)
    shares.leave("e")
    found = [set(shares.weights(2)) for _ in range(2)]
    assert found == [{"a", "b"}, {"c", "d"}]
    assert shares.weights(64).keys() == set("abcd")
