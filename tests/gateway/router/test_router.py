from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import structlog
from prometheus_client import CollectorRegistry

from headwater.bench.receipt_replay import Receipt, accuracy, judge, receipts
from headwater.gateway.router.cost import Parts
from headwater.gateway.router.decision import Decision
from headwater.gateway.router.dispatches import Dispatch
from headwater.gateway.router.policy import POLICIES
from headwater.gateway.router.router import Router
from headwater.gateway.settings import ROUTING_POLICIES
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.member import (
    Kind,
    Member,
    ReplicaLoad,
    ServedAdapter,
    new_epoch,
)
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store

BLOCK = 16
IDLE = ReplicaLoad(
    prefill_tps=1000.0,
    itl_seconds=0.02,
    itl_seconds_per_request=0.002,
    num_total_blocks=10_000,
    max_running=64,
)


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{number}".encode().ljust(16, b".") for number in range(length)]


class Cluster:
    """A router over replicas that exist as members, columns and load messages."""

    def __init__(self, model: ServedModel, names: str, policy: str = "seconds") -> None:
        self.now = 100.0
        self.model = model
        self.members = Members(Bus(None), (Kind.ENGINE,))
        self.feed = IndexFeed(Bus(None), self.members, Store(None))
        self.registry = CollectorRegistry()
        self.router = Router(
            Bus(None),
            self.members,
            self.feed,
            registry=self.registry,
            clock=lambda: self.now,
            score=POLICIES[policy],
            logged_share=0.5,
        )
        self.replicas = {
            name: Member(
                kind=Kind.ENGINE,
                replica_id=name,
                epoch=new_epoch(),
                address=f"{name}:1",
                model=model,
                numerics_id="n",
            )
            for name in names
        }

    def reports(self, name: str, load: ReplicaLoad = IDLE, *, draining: bool = False) -> None:
        self.replicas[name] = replace(self.replicas[name], load=load, draining=draining)
        self.members.on_member(self.replicas[name], from_bus=True)

    def caches(self, name: str, blocks: list[bytes]) -> None:
        index = self.feed.index(self.model.key)
        member = self.replicas[name]
        column = index.open(name, member.epoch)
        index.fill(column, blocks)
        index.publish(column, 1)

    def choose(
        self,
        blocks: list[bytes],
        exclude: tuple[str, ...] = (),
        extra_tokens: int = 1,
        adapter: bytes = b"",
    ) -> Decision:
        num_tokens = len(blocks) * BLOCK + extra_tokens
        failed = [(name, self.replicas[name].epoch) for name in exclude]
        return self.router.choose(
            self.model.key, b"".join(blocks), num_tokens, 64, exclude=failed, adapter=adapter
        )

    def sends(self, blocks: list[bytes]) -> Dispatch:
        return self.router.dispatches.begin(self.choose(blocks), uuid.uuid4().hex)


@pytest.fixture
async def cluster(served_model: ServedModel) -> AsyncIterator[Cluster]:
    """Two idle replicas with empty caches that are known to be empty."""
    made = Cluster(served_model, "ab")
    async with made.router.running():
        for name in "ab":
            made.reports(name)
            made.caches(name, [])
        yield made


async def test_the_holder_of_a_prefix_gets_its_continuation(cluster: Cluster) -> None:
    cluster.caches("b", chain("x", 20))
    decision = cluster.choose(chain("x", 24))
    assert (decision.replica_id, decision.address, decision.reason) == ("b", "b:1", "prefix")
    assert decision.predicted_cached_tokens == 20 * BLOCK
    assert cluster.choose(chain("x", 20), extra_tokens=0).predicted_cached_tokens == 19 * BLOCK


async def test_a_new_prompt_goes_where_it_evicts_least_and_a_cached_one_to_its_blocks(
    cluster: Cluster,
) -> None:
    for name, cost in (("a", 0.8), ("b", 0.1)):
        cluster.reports(name, replace(IDLE, eviction_cost=cost))
    decision = cluster.choose(chain("new", 20))
    assert decision.replica_id == "b"
    evict = {each.replica_id: each.parts.evict for each in decision.candidates}
    num_tokens = 20 * BLOCK + 1 + 64
    assert evict == pytest.approx({"a": 0.8 * num_tokens / 1000, "b": 0.1 * num_tokens / 1000})
    cluster.caches("a", chain("x", 20))
    assert cluster.choose(chain("x", 22)).replica_id == "a"


def test_every_policy_has_a_name_that_the_setting_takes() -> None:
    assert tuple(POLICIES) == ROUTING_POLICIES


@pytest.mark.parametrize(
    ("name", "chosen"), [("seconds", "b"), ("load", "c"), ("requests", "a")], ids=ROUTING_POLICIES
)
async def test_a_policy_by_name_weighs_its_own_parts(
    served_model: ServedModel, name: str, chosen: str
) -> None:
    """b holds the prompt behind a short queue, c is idle but runs a request, a has none running and
    a queue."""
    cluster = Cluster(served_model, "abc", name)
    async with cluster.router.running():
        cluster.reports("a", replace(IDLE, num_prefill_tokens=900))
        cluster.reports("b", replace(IDLE, num_waiting=1, num_prefill_tokens=300))
        cluster.reports("c", replace(IDLE, num_running=2))
        for each in "ac":
            cluster.caches(each, [])
        cluster.caches("b", chain("x", 24))
        assert cluster.choose(chain("x", 24)).replica_id == chosen


async def test_a_holder_with_a_long_line_loses_to_an_idle_replica(cluster: Cluster) -> None:
    cluster.caches("b", chain("x", 20))
    cluster.reports("b", replace(IDLE, num_waiting=4, num_prefill_tokens=600))
    assert cluster.choose(chain("x", 24)).replica_id == "b"
    cluster.reports("b", replace(IDLE, num_waiting=8, num_prefill_tokens=700))
    assert cluster.choose(chain("x", 24)).replica_id == "a"


async def test_a_replica_that_has_the_adapter_on_its_device_goes_before_one_that_copies_it(
    cluster: Cluster,
) -> None:
    poet = b"p" * 16
    for name in "ab":
        has = (ServedAdapter(name="", digest=poet, rank=8),)
        cluster.replicas[name] = replace(cluster.replicas[name], adapters=has)
    cluster.reports("a")
    for name in "ba":
        other = "ab"[name == "a"]
        cluster.reports(other)
        cluster.reports(name, replace(IDLE, resident_adapters=(poet,)))
        decision = cluster.choose(chain("x", 2), adapter=poet)
        assert decision.replica_id == name
        costs = {
            each["replica_id"]: each["adapter_seconds"] for each in decision.receipt["candidates"]
        }
        assert costs == {name: 0.0, other: 0.005}
    # A cached prefix of half a second weighs more.
    cluster.caches("b", chain("y", 30))
    assert cluster.choose(chain("y", 32), adapter=poet).replica_id == "b"
    # A request on its way brings the adapter with it, before a report says so.
    cluster.reports("a")
    sent = cluster.router.dispatches.begin(cluster.choose(chain("z", 2), adapter=poet), "r")
    again = cluster.choose(chain("w", 2), adapter=poet).receipt["candidates"]
    costs = {each["replica_id"]: each["adapter_seconds"] for each in again}
    assert costs[sent.decision.replica_id] == 0.0
    assert sorted(costs.values()) == [0.0, 0.005]


async def test_an_unrelated_prompt_goes_to_the_less_loaded_replica(cluster: Cluster) -> None:
    first, second, third = (cluster.sends(chain(name, 10)) for name in "xyz")
    assert {first.replica.member.replica_id, second.replica.member.replica_id} == {"a", "b"}
    for dispatch in (first, second, third):
        cluster.router.dispatches.started(dispatch, 0)
    cluster.now += 1
    cluster.router.dispatches.finished(third)
    cluster.router.dispatches.finished(second)
    assert cluster.choose(chain("w", 10)).replica_id == second.replica.member.replica_id


async def test_a_burst_of_one_prefix_follows_its_first_request_and_a_burst_of_many_spreads(
    cluster: Cluster,
) -> None:
    burst = [cluster.sends(chain("same", 100)).replica.member.replica_id for _ in range(5)]
    assert burst == [burst[0]] * 5
    spread = [
        cluster.sends(chain(f"other{number}", 100)).replica.member.replica_id
        for number in range(20)
    ]
    assert 8 <= spread.count("a") <= 12


async def test_sub_agents_of_a_prefix_land_together_until_waiting_costs_more_than_computing_it(
    cluster: Cluster,
) -> None:
    """The longer the prefix that a group shares, the more of it wait at one replica."""

    def num_together(name: str, num_shared: int) -> int:
        prefix = chain(name, num_shared)
        sent = [cluster.sends([*prefix, *chain(f"{name}{task}-", 8)]) for task in range(80)]
        chosen = [each.decision.replica_id for each in sent]
        for each in sent:
            cluster.router.dispatches.finished(each)
        assert set(chosen) == {"a", "b"}
        return max(chosen.index("a"), chosen.index("b"))

    short = num_together("short", 40)
    long = num_together("long", 200)
    assert 2 <= short < long < 80


async def test_a_prefix_that_all_hold_spreads_over_all(cluster: Cluster) -> None:
    for name in "ab":
        cluster.caches(name, chain("hot", 50))
    chosen = []
    for _ in range(10):
        dispatch = cluster.sends(chain("hot", 50))
        cluster.router.dispatches.started(dispatch, 800)
        cluster.router.dispatches.finished(dispatch)
        cluster.now += 0.1
        chosen.append(dispatch.replica.member.replica_id)
    assert chosen in (["a", "b"] * 5, ["b", "a"] * 5)


async def test_draining_full_and_failing_replicas_are_skipped_while_another_can_take_it(
    cluster: Cluster,
) -> None:
    cluster.caches("b", chain("x", 20))
    cluster.reports("b", draining=True)
    assert cluster.choose(chain("x", 24)).replica_id == "a"
    cluster.reports("b", replace(IDLE, num_used_blocks=9_600))
    assert cluster.choose(chain("x", 24)).replica_id == "a"
    cluster.reports("b")
    cluster.router.dispatches.finished(cluster.sends(chain("x", 24)), failed=True)
    decision = cluster.choose(chain("x", 24))
    assert decision.replica_id == "a"
    assert {each.replica_id: each.guard for each in decision.candidates} == {
        "a": "",
        "b": "failing",
    }
    cluster.now += 1.1
    assert cluster.choose(chain("x", 24)).replica_id == "b"


async def test_when_every_replica_is_full_the_cheapest_takes_it_and_when_all_drain_none(
    cluster: Cluster,
) -> None:
    cluster.reports("a", replace(IDLE, num_used_blocks=9_990))
    cluster.reports("b", replace(IDLE, num_used_blocks=9_700))
    assert cluster.choose(chain("x", 4)).replica_id == "b"
    cluster.reports("a", draining=True)
    cluster.reports("b", draining=True)
    with pytest.raises(Unavailable, match="a draining, b draining"):
        cluster.choose(chain("x", 4))


async def test_a_replica_that_failed_the_request_is_not_asked_again(cluster: Cluster) -> None:
    cluster.caches("b", chain("x", 20))
    assert cluster.choose(chain("x", 24), exclude=("b",)).replica_id == "a"
    with pytest.raises(Unavailable):
        cluster.choose(chain("x", 24), exclude=("a", "b"))


async def test_a_model_without_replicas_is_unavailable_with_a_time_to_retry(
    cluster: Cluster,
) -> None:
    with pytest.raises(Unavailable) as caught:
        cluster.router.choose("0" * 16, b"", 10, 10)
    assert caught.value.retry_after == 1.0
    assert caught.value.code == "no_replica"


async def test_without_an_index_a_prefix_stays_at_its_home_and_homes_differ(
    served_model: ServedModel,
) -> None:
    cluster = Cluster(served_model, "abcd")
    async with cluster.router.running():
        for name in "abcd":
            cluster.reports(name)
        homes = {}
        for number in range(40):
            short = cluster.choose(chain(f"p{number}-", 3))
            long = cluster.choose(chain(f"p{number}-", 9))
            assert short.replica_id == long.replica_id
            assert short.reason == "home"
            homes[number] = short.replica_id
        assert set(homes.values()) == set("abcd")
        cluster.members.on_member(replace(cluster.replicas["a"], leaving=True), from_bus=True)
        moved = [
            number
            for number in range(40)
            if cluster.choose(chain(f"p{number}-", 3)).replica_id != homes[number]
        ]
        assert moved == [number for number in range(40) if homes[number] == "a"]


async def test_a_home_with_a_long_line_gives_way(served_model: ServedModel) -> None:
    cluster = Cluster(served_model, "ab")
    async with cluster.router.running():
        for name in "ab":
            cluster.reports(name)
        home = cluster.choose(chain("x", 10)).replica_id
        cluster.reports(home, replace(IDLE, num_prefill_tokens=1000))
        assert cluster.choose(chain("x", 10)).replica_id != home


async def test_hits_that_do_not_come_true_cost_a_replica_its_trust(cluster: Cluster) -> None:
    cluster.caches("b", chain("x", 20))
    for _ in range(8):
        dispatch = cluster.router.dispatches.begin(
            cluster.choose(chain("x", 24), exclude=("a",)), "r"
        )
        cluster.router.dispatches.started(dispatch, 0)
        cluster.router.dispatches.finished(dispatch)
    assert cluster.registry.get_sample_value(
        "headwater_router_trust", {"replica": "b"}
    ) == pytest.approx(0.9**8)
    assert (
        cluster.registry.get_sample_value("headwater_router_doubted_total", {"replica": "b"}) == 5
    )
    trust = {each.replica_id: each.trust for each in cluster.choose(chain("x", 24)).candidates}
    assert trust == {"a": 1.0, "b": pytest.approx(0.9**8)}
    cluster.members.on_member(replace(cluster.replicas["b"], leaving=True), from_bus=True)
    assert cluster.registry.get_sample_value("headwater_router_trust", {"replica": "b"}) is None, (
        "nobody's now"
    )


async def test_a_receipt_is_json_with_the_cost_of_every_candidate(cluster: Cluster) -> None:
    cluster.caches("b", chain("x", 20))
    dispatch = cluster.sends(chain("x", 24))
    cluster.router.dispatches.started(dispatch, 320)
    receipt = json.loads(json.dumps(dispatch.decision.receipt))
    assert receipt["replica_id"] == "b"
    assert receipt["predicted_cached_tokens"] == receipt["actual_cached_tokens"] == 320
    costs = {each["replica_id"]: each["cost_seconds"] for each in receipt["candidates"]}
    assert costs["b"] < costs["a"]
    # 385 prompt tokens at 1,000 a second, twice; one decode step of two rows; hardly any pressure.
    assert costs["a"] == pytest.approx(2 * 0.385 + 0.020, abs=0.002)


async def test_a_logged_receipt_says_how_it_turned_out_and_can_be_scored_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.caches("b", chain("x", 20))
    cluster.reports("b", replace(IDLE, num_waiting=1, num_prefill_tokens=100))
    log = tmp_path / "gateway.log"
    with structlog.testing.capture_logs() as lines:
        for number in range(4 * 2):
            dispatch = cluster.router.dispatches.begin(
                cluster.choose(chain("x", 24)), f"r{1 + number // 4}"
            )
            cluster.now += 0.25
            cluster.router.dispatches.started(dispatch, 320)
            cluster.router.dispatches.finished(dispatch)
    log.write_text("\n".join(json.dumps(line) for line in lines))
    found = list(receipts(log))
    # Half of the requests: every attempt of one, none of the other.
    assert {line["request_id"] for line in lines} < {"r1", "r2"}
    assert [(each.replica_id, each.actual_prefill_seconds) for each in found] == [("b", 0.25)] * 4
    assert judge(found, "seconds").same == 1.0
    assert judge(found, "load").same < 1.0
    assert judge(found, "overlap").matched_tokens >= 320
    assert accuracy(found)["cached"] <= 1.0


async def test_a_receipt_keeps_every_part_of_a_cost(cluster: Cluster) -> None:
    decision = cluster.choose(chain("x", 24))
    parts = Parts(*range(1, 1 + len(Parts.__struct_fields__)))
    decision.candidates = (msgspec.structs.replace(decision.candidates[0], parts=parts),)
    [candidate] = msgspec.convert(decision.receipt, Receipt).candidates
    assert candidate.parts == parts, (
        "name the part in `_plain` of decision.py and in bench/receipt_replay.py"
    )


async def test_load_messages_arrive_over_the_bus_and_those_of_another_incarnation_do_not_count(
    nats_url: str, served_model: ServedModel
) -> None:
    async with Bus.open(nats_url) as bus:
        members = Members(bus, (Kind.ENGINE,))
        router = Router(bus, members, IndexFeed(bus, members, Store(None)))
        cluster = Cluster(served_model, "ab")
        async with router.running():
            for member in cluster.replicas.values():
                members.on_member(member, from_bus=True)
            a = cluster.replicas["a"]
            b = cluster.replicas["b"]
            await bus.publish(
                subjects.load(served_model.key, "a"),
                replace(IDLE, num_prefill_tokens=5000).to_pb("a", a.epoch).SerializeToString(),
            )
            await bus.publish(
                subjects.load(served_model.key, "b"),
                replace(IDLE, num_prefill_tokens=9000).to_pb("b", b.epoch + 1).SerializeToString(),
            )
            async with asyncio.timeout(60):
                while True:
                    seen = router.choose(served_model.key, b"", 10, 10).candidates
                    ages = {each.replica_id: each.load_age for each in seen}
                    if ages["a"] >= 0:
                        break
                    await asyncio.sleep(0.01)
            assert ages["b"] == -1
            assert router.choose(served_model.key, b"", 10, 10).replica_id == "b"


async def test_a_prompt_that_is_new_to_all_goes_where_the_cache_has_most_room(
    cluster: Cluster,
) -> None:
    small = replace(IDLE, num_total_blocks=64)
    cluster.caches("a", chain("old", 32))
    cluster.reports("a", small)
    cluster.reports("b", small)
    assert [cluster.choose(chain(f"new{number}", 2)).replica_id for number in range(3)] == ["b"] * 3
    cluster.caches("b", chain("also old", 34))
    dispatch = cluster.sends(chain("new", 2))
    cluster.router.dispatches.started(dispatch, 0)
    other = cluster.choose(chain("newer", 2)).replica_id
    assert other != dispatch.replica.member.replica_id


async def test_replicas_need_no_more_prompts_waiting_than_they_run_at_once(
    cluster: Cluster,
) -> None:
    epoch = cluster.router.peers.epoch

    def most_prompts() -> int | None:
        """Prompts at which there is no more room; None where there always is."""
        return next(
            (
                num
                for num in range(1000)
                if not cluster.router.capacity.has_room(cluster.model.key, 0, num)
            ),
            None,
        )

    cluster.reports("a", replace(IDLE, max_running=32, waiting_credits={epoch: 10**6}))
    cluster.reports("b", replace(IDLE, max_running=8))
    assert most_prompts() == 40
    cluster.reports("a", replace(IDLE, max_running=32, waiting_credits={epoch: 0}))
    assert most_prompts() == 40, "b has not said how much may wait there"
    cluster.reports("b", replace(IDLE, max_running=8, waiting_credits={epoch: 0}))
    assert most_prompts() == 0
    cluster.reports("b", replace(IDLE, max_running=0))
    assert most_prompts() is None, "b does not say how many it runs"


async def test_room_at_replicas_is_what_they_let_this_gateway_have_waiting_less_what_does(
    cluster: Cluster,
) -> None:
    epoch = cluster.router.peers.epoch

    def has_room(num_tokens: int) -> bool:
        return cluster.router.capacity.has_room(cluster.model.key, num_tokens, 0)

    assert has_room(10**9)
    for name in "ab":
        cluster.reports(name, replace(IDLE, waiting_credits={epoch: 300, 1: 9000}))
    assert has_room(599)
    assert not has_room(600)
    sent = [cluster.sends(chain(name, 20)) for name in "xyz"]
    assert not has_room(0)
    # 1,000 tokens a second: the first of a line is nearly done after so long.
    cluster.now += 0.2
    assert has_room(0)
    for dispatch in sent:
        cluster.router.dispatches.started(dispatch, 0)
    assert has_room(599)
    cluster.reports("a", replace(IDLE, waiting_credits={1: 9000}))
    assert has_room(10**9)
    for name in "ab":
        cluster.reports(name, replace(IDLE, waiting_credits={epoch: 1}), draining=True)
    assert has_room(10**9)


async def test_hits_that_have_to_be_brought_to_the_device_cost_the_time_that_they_take(
    cluster: Cluster,
) -> None:
    cluster.caches("b", blocks := chain("x", 64))
    for seconds, expected in ((0.0, 0.001), (0.0005, 0.5125), (1.0, 1.024)):
        cluster.reports("b", replace(IDLE, seconds_per_hit_token=seconds))
        own = {
            each.replica_id: each.parts.own
            for each in cluster.choose(blocks, extra_tokens=0).candidates
        }
        assert own == pytest.approx({"a": 1.024, "b": expected}), "never more than computing them"


def test_a_replica_that_has_more_of_the_prompt_than_the_chosen_one_is_named(
    cluster: Cluster,
) -> None:
    blocks = chain("p", 8)
    cluster.caches("a", blocks)
    cluster.caches("b", blocks[:2])
    assert (cluster.choose(blocks).replica_id, cluster.choose(blocks).holder) == ("a", None)
    cluster.reports("a", replace(IDLE, num_prefill_tokens=50_000))
    decision = cluster.choose(blocks)
    assert decision.replica_id == "b"
    assert decision.holder is not None
    assert (decision.holder.member.address, decision.holder.num_tokens) == ("a:1", 8 * BLOCK)
    assert decision.receipt["holder"] == {"replica_id": "a", "tokens": 8 * BLOCK}


def test_one_that_leaves_is_named_and_one_that_failed_is_not(cluster: Cluster) -> None:
    blocks = chain("p", 8)
    cluster.caches("a", blocks)
    cluster.caches("b", [])
    assert cluster.choose(blocks, exclude=("a",)).holder is None
    cluster.reports("a", draining=True)
    decision = cluster.choose(blocks)
    assert (decision.replica_id, decision.holder is not None) == ("b", True)


async def test_where_one_failed_the_next_best_is_named(served_model: ServedModel) -> None:
    cluster = Cluster(served_model, "abc")
    blocks = chain("p", 64)
    able = replace(IDLE, seconds_per_pulled_token=0.0001)
    async with cluster.router.running():
        for name, num_blocks in (("a", 64), ("b", 0), ("c", 32)):
            cluster.reports(name, replace(able, num_prefill_tokens=50_000) if name == "c" else able)
            cluster.caches(name, blocks[:num_blocks])
        decision = cluster.choose(blocks, exclude=("a",))
        assert decision.replica_id == "b"
        assert decision.holder is not None
        assert (decision.holder.member.replica_id, decision.holder.num_tokens) == ("c", 32 * BLOCK)
        # It computes what only the one that failed has.
        assert decision.predicted_seconds == pytest.approx(
            0.001 * (32 * BLOCK + 1) + 0.0001 * 32 * BLOCK
        )


def test_one_that_computes_other_bits_is_not_named(cluster: Cluster) -> None:
    blocks = chain("p", 8)
    cluster.replicas["a"] = replace(cluster.replicas["a"], numerics_id="other")
    cluster.reports("a", replace(IDLE, num_prefill_tokens=50_000))
    cluster.caches("a", blocks)
    cluster.caches("b", [])
    decision = cluster.choose(blocks)
    assert (decision.replica_id, decision.holder) == ("b", None)


async def test_the_predicted_answer_is_the_room_that_a_replica_is_asked_for(
    cluster: Cluster,
) -> None:
    """Two replicas are nearly full: a long answer goes to the one with more room."""
    cluster.reports("a", replace(IDLE, num_used_blocks=9_000))
    cluster.reports("b", replace(IDLE, num_used_blocks=9_100, itl_seconds=0.0199))
    filled = {
        expected: cluster.router.choose(
            cluster.model.key, b"", BLOCK, 100_000, expected_tokens=expected
        )
        .candidates[0]
        .parts.filled
        for expected in (BLOCK, 100 * BLOCK)
    }
    assert filled[100 * BLOCK] - filled[BLOCK] == pytest.approx(99 / 10_000)
    bounded = cluster.router.choose(cluster.model.key, b"", BLOCK, BLOCK, expected_tokens=9_000)
    assert bounded.candidates[0].parts.filled == pytest.approx(filled[BLOCK]), "max_tokens"


async def test_a_queue_has_the_policy_of_its_replicas_and_counts_uncached_tokens_and_blocks(
    cluster: Cluster,
) -> None:
    router = cluster.router
    key = cluster.model.key
    assert router.capacity.policies(key).default.name == "fair"
    assert (
        router.capacity.prompt_seconds("other", 500),
        router.capacity.has_blocks("other", 9),
    ) == (0.0, True)
    cluster.reports("a", replace(IDLE, policy="from a later version"))
    assert router.capacity.policies(key).default.name == "fair"
    cluster.reports("b", replace(IDLE, policy="srpt,1=slo", num_used_blocks=9_990))
    assert router.capacity.policies(key).of_tier(1).name == "slo"
    assert router.capacity.prompt_seconds(key, 500) == pytest.approx(0.25), "two replicas share it"
    assert router.capacity.has_blocks(key, 20_000), "an idle replica takes any"
    cluster.reports("a", replace(IDLE, num_used_blocks=9_900))
    assert [router.capacity.has_blocks(key, num_blocks) for num_blocks in (100, 101)] == [
        True,
        False,
    ]
    cluster.caches("b", chain("river", 10))
    hashes = b"".join(chain("river", 10))
    assert router.num_uncached(key, hashes, 10 * BLOCK + 5) == 5
    assert router.num_uncached(key, hashes, 10 * BLOCK) == 1, "the last one is always computed"
    assert router.num_uncached(key, b"".join(chain("sea", 10)), 10 * BLOCK) == 10 * BLOCK
