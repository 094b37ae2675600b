"""The gateway's queue under each policy."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from headwater.gateway.request.admission import Admission
from headwater.gateway.request.model_queue import Terms
from headwater.services.runtime.errors import DeadlineExceeded
from headwater.services.runtime.queue_policy import Policies

SECONDS_PER_TOKEN = 1e-3


class Replicas:
    """Replicas that compute a prompt token in a millisecond, with so many KV blocks."""

    def __init__(self, policy: str, num_blocks: int = 1 << 30) -> None:
        self.policy = policy
        self.num_blocks = num_blocks

    def policies(self, model_key: str) -> Policies:
        return Policies.of(self.policy)

    def prompt_seconds(self, model_key: str, num_tokens: int) -> float:
        return num_tokens * SECONDS_PER_TOKEN

    def has_blocks(self, model_key: str, num_blocks: int) -> bool:
        return num_blocks <= self.num_blocks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Queue:
    """An admission that lets one request run, and the order in which requests ran."""

    def __init__(self, policy: str) -> None:
        self.clock = Clock()
        self.replicas = Replicas(policy)
        self.admission = Admission(1, 1000, self.clock, replicas=self.replicas)
        self.order: list[str] = []
        self.fcfs: dict[str, float] = {}
        self.errors: dict[str, DeadlineExceeded] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.all_are_there = asyncio.Event()

    async def ask(self, name: str, **more: Any) -> None:
        self.tasks.append(asyncio.create_task(self._run(name, **more)))
        await asyncio.sleep(0)

    async def _run(
        self,
        name: str,
        *,
        tokens: int = 10,
        tier: int = 0,
        time: float = 0.0,
        tenant: str = "a",
        answer: float = 10.0,
        due: float = float("inf"),
        blocks: int = 0,
    ) -> None:
        terms = Terms(
            num_answer_tokens=answer,
            cost=tokens + 2 * answer,
            first_token_by=due,
            num_blocks=blocks,
        )
        try:
            turn = await self.admission.take(tier, time, "m", tenant, tokens, 1, terms)
        except DeadlineExceeded as late:
            self.errors[name] = late
            return
        with turn:
            self.order.append(name)
            self.fcfs[name] = turn.fcfs_seconds
            await self.all_are_there.wait()
            self.clock.now += tokens * SECONDS_PER_TOKEN

    async def end(self) -> None:
        self.all_are_there.set()
        await asyncio.gather(*self.tasks)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["low", "long", "late", "short"]),
        ("priority", ["long", "late", "short", "low"]),
        ("fair", ["short", "late", "long", "low"]),
        ("srpt", ["short", "late", "long", "low"]),
        ("mlfq", ["late", "short", "long", "low"]),
        ("slo", ["late", "short", "long", "low"]),
    ],
)
async def test_each_policy_has_its_order(policy: str, order: list[str]) -> None:
    queue = Queue(policy)
    await queue.ask("first")
    await queue.ask("low", tier=1)
    await queue.ask("long", tokens=5000, time=3.0, due=1000.0)
    await queue.ask("late", tokens=20, time=2.0, due=110.0)
    await queue.ask("short", tokens=10, time=1.0, due=120.0)
    await queue.end()
    assert queue.order == ["first", *order]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "srpt", "mlfq", "slo"])
async def test_tenants_take_turns_by_what_they_were_given(policy: str) -> None:
    """One has long answers, one short ones, one ten times as many requests: until the first of them
    has none left, each is given about as much."""
    queue = Queue(policy)
    await queue.ask("first")
    sizes = {"long": 100, "short": 10, "many": 10}
    for tenant, count in (("many", 300), ("long", 10), ("short", 100)):
        size = sizes[tenant]
        for number in range(count):
            await queue.ask(
                f"{tenant} {number}",
                tenant=tenant,
                tokens=size,
                answer=size,
                time=number * 3.0 * size,
            )
    await queue.end()
    given = Counter[str]()
    for name in queue.order[1:150]:
        tenant = name.split()[0]
        given[tenant] += sizes[tenant]
    shares = [given[tenant] for tenant in sizes]
    jain = sum(shares) ** 2 / (3 * sum(share * share for share in shares))
    assert jain >= 0.95, given


async def test_under_slo_what_would_be_late_is_refused_with_the_time_to_try_again() -> None:
    queue = Queue("slo")
    refused = list[str]()
    queue.admission.on_late = refused.append
    await queue.ask("first")
    await queue.ask("in time", tokens=400, due=100.5)
    await queue.ask("too much", tokens=400, due=100.6)
    await queue.ask("no goal", tokens=9000)
    await queue.end()
    assert queue.order == ["first", "in time", "no goal"]
    error = queue.errors["too much"]
    assert error.retry_after == pytest.approx(0.21, abs=0.02)
    assert "s too late" in str(error)
    assert refused == ["slo"]


async def test_a_turn_knows_the_wait_in_order_of_arrival() -> None:
    queue = Queue("srpt")
    await queue.ask("first", tokens=100)
    await queue.ask("long", tokens=4000)
    await queue.ask("short", tokens=10)
    await queue.end()
    assert queue.order == ["first", "short", "long"]
    assert queue.fcfs["first"] == 0.0
    assert queue.fcfs["long"] == pytest.approx(0.1), "the turn that the short one took"
    assert queue.fcfs["short"] > 3.0


async def test_a_prompt_waits_for_kv_blocks_and_not_for_a_number_of_requests() -> None:
    clock = Clock()
    replicas = Replicas("fair", num_blocks=10)
    admission = Admission(100, 100, clock, replicas=replicas)
    turns = [await admission.take(0, terms=Terms(num_blocks=4)) for _ in range(2)]
    waiting = asyncio.create_task(admission.take(0, terms=Terms(num_blocks=4)))
    small = asyncio.create_task(admission.take(0, terms=Terms(num_blocks=1)))
    await asyncio.sleep(0)
    assert (waiting.done(), admission.num_running) == (False, 2)
    turns[0].release()
    with await waiting, await small:
        assert admission.num_running == 3
    turns[1].release()


async def test_the_queue_follows_a_policy_that_changes() -> None:
    queue = Queue("fcfs")
    await queue.ask("first")
    await queue.ask("long", tokens=500)
    queue.replicas.policy = "srpt"
    await queue.ask("short")
    await queue.end()
    assert queue.order == ["first", "short", "long"]
