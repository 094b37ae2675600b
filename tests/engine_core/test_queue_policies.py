"""Queue policies on an engine with a virtual clock: order, aging, refusals, shares of tenants."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.queue_policies import (
    AGING,
    BLOCKED_SECONDS,
    LAST_LEVEL,
    POLICIES,
    PROMOTION_SECONDS,
    QUANTUM_TOKENS,
    Facts,
    Policies,
    PolicyError,
)
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import Started

EVERY = list(POLICIES)
PREFILL_SECONDS = 1e-4
CONFIG = EngineConfig(
    num_blocks=400,
    max_model_len=2048,
    max_num_seqs=4,
    max_num_batched_tokens=256,
    async_depth=1,
)


class Bench:
    """An engine whose steps take 10 ms, and 0.1 ms for each prompt token."""

    def __init__(
        self, policy: str, config: EngineConfig = CONFIG, *, step_seconds: float = 0.01
    ) -> None:
        self.now = 0.0
        self.config = replace(config, policy=policy)
        timing = SimulatedTiming(
            step_seconds=step_seconds, seconds_per_prefill_token=PREFILL_SECONDS
        )
        executor = SimulatedExecutor(
            self.config,
            SimulatedModel(vocab_size=1000),
            timing,
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        self.engine = Engine(self.config, executor, clock=lambda: self.now)
        self.num_added = 0
        self.tokens = Counter[int]()
        self.first_token_at: dict[int, float] = {}
        self.starts: dict[int, Started] = {}
        self.ends: dict[int, FinishReason] = {}
        self.retry_seconds: dict[int, float] = {}
        self.ids: dict[int, list[int]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add(
        self,
        prompt_len: int = 32,
        answer_len: int = 4,
        *,
        tenant: str = "a",
        tier: int = 0,
        virtual_time: float = 0.0,
        goal: float = 0.0,
        expected: int = 0,
        weight: float = 1.0,
    ) -> int:
        key = self.num_added
        self.num_added += 1
        self.engine.add(
            NewRequest(
                key=key,
                prompt_ids=[(key * 31 + i) % 900 + 3 for i in range(prompt_len)],
                output_ids=[],
                sampling=SamplingParams(max_tokens=answer_len),
                tenant=tenant,
                tier=tier,
                weight=weight,
                virtual_time=virtual_time,
                num_expected_tokens=expected,
                first_token_seconds=goal,
            )
        )
        return key

    def step(self) -> None:
        before = self.now
        output = self.engine.step()
        if self.now == before:
            self.now += 1e-3
        if output is None:
            return
        at = 0
        for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
            self.tokens[key] += num_tokens
            self.first_token_at.setdefault(key, self.now)
            self.ids.setdefault(key, []).extend(output.token_ids[at : at + num_tokens])
            at += num_tokens
        self.starts |= {start.key: start for start in output.starts}
        self.ends |= {finish.key: finish.reason for finish in output.finishes}
        self.retry_seconds |= {each.key: each.retry_seconds for each in output.finishes}

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if len(self.ends) == self.num_added:
                return
            self.step()
        raise AssertionError("it does not end")

    def order(self) -> list[int]:
        """Requests in the order of their first tokens."""
        return sorted(self.first_token_at, key=self.first_token_at.__getitem__)


ONE_SEAT = replace(CONFIG, max_num_seqs=1)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [0, 1, 2, 3]),
        ("priority", [0, 2, 3, 1]),
        ("fair", [0, 3, 2, 1]),
        ("srpt", [0, 2, 3, 1]),
        ("mlfq", [0, 2, 3, 1]),
        ("slo", [0, 3, 2, 1]),
    ],
)
def test_each_policy_has_its_order(policy: str, order: list[int]) -> None:
    """Request 1 is long and of a low tier; 2 came before 3, which has less virtual time, a sooner
    goal, but an answer as long."""
    bench = Bench(policy, ONE_SEAT)
    bench.add(16, 30)
    bench.step()
    bench.add(1000, 4, tier=1, virtual_time=9.0, goal=50.0)
    bench.add(16, 4, virtual_time=5.0, goal=20.0)
    bench.add(16, 4, virtual_time=2.0, goal=10.0)
    bench.run()
    assert bench.order() == order


def test_a_tier_may_have_a_policy_of_its_own() -> None:
    bench = Bench("priority,1=srpt", ONE_SEAT)
    bench.add(16, 30)
    bench.step()
    long_low = bench.add(900, 4, tier=1)
    short_low = bench.add(16, 4, tier=1)
    long_high = bench.add(900, 4)
    short_high = bench.add(16, 4)
    bench.run()
    assert bench.order()[1:] == [long_high, short_high, short_low, long_low]


def test_the_shortest_goes_before_a_prompt_of_its_tenant_that_is_being_computed() -> None:
    waits = {}
    for policy in ("fcfs", "srpt"):
        bench = Bench(policy)
        bench.add(2000, 4)
        bench.step()
        short = bench.add(32, 4)
        begin = bench.now
        bench.run()
        waits[policy] = bench.first_token_at[short] - begin
    assert waits["srpt"] < 0.06
    assert waits["fcfs"] > 4 * waits["srpt"]


def test_a_short_request_takes_the_seat_of_a_long_answer_and_its_tokens_stay_the_same() -> None:
    ids = {}
    for policy, num_tokens in (("fcfs", 5), ("srpt", 5), ("mlfq", QUANTUM_TOKENS)):
        bench = Bench(policy, ONE_SEAT)
        long_answer = bench.add(16, 900, expected=900)
        while bench.tokens[long_answer] < num_tokens:
            bench.step()
        short = bench.add(16, 4, expected=4)
        bench.run()
        is_first = bench.first_token_at[short] < bench.now - 1.0
        assert is_first == (policy != "fcfs")
        assert bench.engine.load().num_preemptions == (policy != "fcfs")
        ids[policy] = bench.ids
    assert ids["srpt"] == ids["mlfq"] == ids["fcfs"]


def test_a_seat_is_not_taken_where_coming_back_costs_more_than_it_saves() -> None:
    """Fifty tokens are left of an answer; a thousand would have to be computed again."""
    bench = Bench("srpt", ONE_SEAT)
    running = bench.add(1000, 50, expected=50)
    while running not in bench.first_token_at:
        bench.step()
    bench.add(16, 4, expected=4)
    bench.run()
    assert bench.engine.load().num_preemptions == 0


@pytest.mark.parametrize("policy", EVERY)
def test_no_request_starves_however_many_come_before_it(policy: str) -> None:
    """One request is the last under each policy: long, of a low tier, with much virtual time. New
    ones come for as long as it waits, and their virtual time advances."""
    bench = Bench(policy, ONE_SEAT, step_seconds=0.1)
    bench.add(16, 8)
    last = bench.add(800, 8, tier=1, virtual_time=20_000.0, expected=1000)
    most = 61.0 + 2000 * PREFILL_SECONDS / AGING
    while last not in bench.ends:
        while bench.num_added - len(bench.ends) < 4:
            bench.add(16, 8, expected=8, goal=30.0, virtual_time=1000 * bench.now)
        bench.step()
        assert bench.now < most, policy
    assert bench.ends[last] is FinishReason.LENGTH


@pytest.mark.parametrize("policy", ["fair", "srpt", "mlfq", "slo", "priority", "fcfs"])
def test_tenants_have_equal_shares_under_each_policy(policy: str) -> None:
    """One tenant asks for short answers, one for long ones, one for ten times as many."""
    bench = Bench(policy, replace(CONFIG, max_num_seqs=8))
    lengths = {"short": 8, "long": 200, "many": 8}
    owners: dict[int, str] = {}
    times = Counter[str]()

    def ask(tenant: str) -> None:
        key = bench.add(
            32, lengths[tenant], tenant=tenant, virtual_time=times[tenant], expected=lengths[tenant]
        )
        times[tenant] += 32 + 2 * lengths[tenant]
        owners[key] = tenant

    for _ in range(30):
        ask("many")
    for _ in range(600):
        waiting = Counter(owners[key] for key in owners if key not in bench.ends)
        for tenant in lengths:
            for _ in range(8 - waiting[tenant]):
                ask(tenant)
        bench.step()
    given_tokens = Counter[str]()
    for key, num_tokens in bench.tokens.items():
        given_tokens[owners[key]] += num_tokens
    shares = [given_tokens[tenant] for tenant in lengths]
    jain = sum(shares) ** 2 / (3 * sum(share * share for share in shares))
    assert jain >= 0.95, given_tokens


def test_a_blocked_head_lets_those_pass_whose_blocks_fit_and_is_not_starved() -> None:
    """An answer holds half of the 64 usable blocks. The next request needs 50; small ones come all
    the time."""
    config = replace(CONFIG, num_blocks=65, max_model_len=1024, max_num_seqs=8)
    passed = {}
    for policy in ("fair", "priority"):
        bench = Bench(policy, config)
        bench.add(480, 500)
        bench.step()
        large = bench.add(790, 8)
        while large not in bench.ends:
            if bench.num_added - len(bench.ends) < 4:
                bench.add(16, 4)
            bench.step()
            assert bench.now < 40.0
        before = [
            key for key, at in bench.first_token_at.items() if at < bench.first_token_at[large]
        ]
        passed[policy] = len(before) - 1
        last = max((bench.first_token_at[key] for key in before if key > large), default=0.0)
    assert passed["fair"] == 0
    assert passed["priority"] > 10
    # Those that pass end soon after the bound, since blocks that come free are kept.
    assert last <= BLOCKED_SECONDS + 0.2


def test_a_request_that_cannot_be_in_time_is_refused_at_once_with_the_time_that_it_would_take() -> (
    None
):
    bench = Bench("slo", replace(CONFIG, max_num_seqs=8))
    keys = [bench.add(1000, 2, goal=0.55) for _ in range(8)]
    bench.step()
    # A prompt takes a tenth of a second.
    assert bench.ends == dict.fromkeys(keys[5:], FinishReason.LATE)
    assert [bench.retry_seconds[key] for key in keys[5:]] == [pytest.approx(0.05)] * 3
    bench.run()
    answered = [key for key in keys if bench.ends[key] is not FinishReason.LATE]
    assert len(answered) >= 3
    assert all(bench.first_token_at[key] <= 0.65 for key in answered)


def test_a_request_without_a_goal_is_never_refused() -> None:
    bench = Bench("slo")
    for _ in range(20):
        bench.add(1500, 2)
    bench.run()
    assert set(bench.ends.values()) == {FinishReason.LENGTH}


def test_a_start_says_the_policy_and_the_wait_in_order_of_arrival() -> None:
    bench = Bench("srpt", ONE_SEAT)
    bench.add(16, 60)
    bench.step()
    long_one = bench.add(1000, 4)
    short = bench.add(16, 4)
    bench.run()
    starts = bench.starts
    assert {start.policy for start in starts.values()} == {"srpt"}
    # The short one would have waited behind the long one, which would have gone first.
    assert starts[short].fcfs_queue_seconds > starts[short].queue_seconds + 0.02
    assert starts[long_one].fcfs_queue_seconds == pytest.approx(
        starts[short].queue_seconds, abs=0.02
    )


def test_a_promoted_request_begins_again_at_the_first_level() -> None:
    bench = Bench("mlfq", ONE_SEAT, step_seconds=0.1)
    bench.add(16, 4)
    waiting = bench.add(2000, 2)
    while bench.now < PROMOTION_SECONDS - 1:
        while bench.num_added - len(bench.ends) < 3:
            bench.add(16, 8)
        bench.step()
    assert waiting not in bench.first_token_at
    while bench.now < PROMOTION_SECONDS + 2:
        while bench.num_added - len(bench.ends) < 3:
            bench.add(16, 8)
        bench.step()
    assert waiting in bench.ends


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(EVERY),
    st.floats(0, 100),
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.floats(0, 1000),
)
def test_waiting_never_puts_a_request_further_back(
    policy: str, arrived_at: float, num_prompt: int, num_answer: int, later: float
) -> None:
    def facts(at: float) -> Facts:
        return Facts(
            arrived_at=at,
            virtual_time=at,
            num_prompt_tokens=num_prompt,
            num_answer_tokens=num_answer,
            num_level=num_prompt,
            first_token_by=at + 1,
        )

    key = POLICIES[policy].key
    assert key(facts(arrived_at)) <= key(facts(arrived_at + later))


def test_levels_double_and_a_long_prompt_skips_some() -> None:
    levels = [
        Facts(arrived_at=0.0, num_level=tokens).level
        for tokens in (0, 1, QUANTUM_TOKENS, QUANTUM_TOKENS + 1, 4 * QUANTUM_TOKENS, 1 << 20)
    ]
    assert levels == [0, 0, 0, 1, 2, LAST_LEVEL]


@pytest.mark.parametrize(
    "text",
    ["last", "fair,", "fair,1", "fair,a=srpt", "fair,1=fcfs", "fcfs,1=srpt", "fair,1=srpt,1=slo"],
)
def test_a_choice_of_policies_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match="allowed: one of fcfs, priority, fair"):
        Policies.of(text)
    with pytest.raises(ConfigError, match=f"policy is {text!r}; allowed"):
        replace(CONFIG, policy=text)
