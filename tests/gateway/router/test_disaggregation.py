"""Which replica computes a prompt and which one goes on, where replicas have roles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from headwater.gateway.router.decision import Decision
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.member import Kind
from headwater.services.runtime.served_model import ServedModel
from tests.gateway.router.test_router import BLOCK, IDLE, Cluster, chain

PREFILL = replace(IDLE, role="prefill")
DECODE = replace(IDLE, role="decode", seconds_per_pulled_token=0.00001)
BUSY = replace(DECODE, num_running=8)
PROMPT = chain("p", 64)
NUM_TOKENS = len(PROMPT) * BLOCK + 1


@pytest.fixture
async def cluster(served_model: ServedModel) -> AsyncIterator[Cluster]:
    """`p` computes prompts, `d` and `e` go on behind it, and run answers."""
    made = Cluster(served_model, "pde")
    async with made.router.running():
        for name, load in (("p", PREFILL), ("d", BUSY), ("e", BUSY)):
            made.reports(name, load)
            made.caches(name, [])
        yield made


def choose(cluster: Cluster, **more: object) -> Decision:
    return cluster.router.choose(cluster.model.key, b"".join(PROMPT), NUM_TOKENS, 64, **more)  # type: ignore[arg-type]


def goes_on(cluster: Cluster, **more: object) -> Decision:
    """The choice for an answer that `p` has begun."""
    lender = cluster.replicas["p"].replica_id, cluster.replicas["p"].epoch
    return choose(cluster, numerics_id="n", lender=lender, **more)


def test_a_long_prompt_is_split_where_answers_run(cluster: Cluster) -> None:
    decision = choose(cluster, may_hand_over=True)
    assert (decision.replica_id, decision.hands_over) == ("p", True)
    assert decision.receipt["hands_over"] is True
    following = goes_on(cluster)
    assert following.replica_id in "de"
    assert following.hands_over is False
    assert following.holder is not None
    assert (following.holder.member.replica_id, following.holder.num_tokens) == ("p", NUM_TOKENS)


def test_the_replica_that_goes_on_soonest_is_named_and_several_prompts_spread(
    cluster: Cluster,
) -> None:
    crowded = replace(DECODE, num_running=1000)
    cluster.reports("d", replace(crowded, num_prefill_tokens=4000))
    cluster.reports("e", crowded)
    first = choose(cluster, may_hand_over=True)
    assert first.successor is not None
    assert first.successor.replica_id == "e"
    assert first.receipt["successor"] == "e"
    cluster.reports("d", crowded)
    dispatched = cluster.router.dispatches.begin(first, "r")
    following = choose(cluster, may_hand_over=True)
    assert following.successor is not None
    assert following.successor.replica_id == "d"
    cluster.router.dispatches.finished(dispatched)
    assert [each.num_expected for each, _ in cluster.router.replicas()] == [0, 0, 0]


def test_a_successor_that_left_and_joined_meanwhile_expects_no_fewer_than_no_requests(
    cluster: Cluster,
) -> None:
    """A replica leaves and joins again if it does not answer for a moment while NATS is away."""
    decision = choose(cluster, may_hand_over=True)
    dispatched = cluster.router.dispatches.begin(decision, "r")
    assert decision.successor is not None
    cluster.members._remove((Kind.ENGINE, decision.successor.replica_id))
    cluster.reports(decision.successor.replica_id, BUSY)
    cluster.router.dispatches.finished(dispatched)
    assert [each.num_expected for each, _ in cluster.router.replicas()] == [0, 0, 0]


def test_the_replica_that_has_blocks_already_goes_on(cluster: Cluster) -> None:
    for name in "de":
        cluster.reports(name, replace(BUSY, num_running=80, seconds_per_pulled_token=0.0002))
    cluster.caches("d", PROMPT[:40])
    decision = choose(cluster, may_hand_over=True)
    assert decision.replica_id == "p"
    assert decision.successor is not None
    assert decision.successor.replica_id == "d"


def test_only_the_last_chunk_is_pulled_behind_the_first_token(cluster: Cluster) -> None:
    def hand_over_seconds() -> float:
        candidates = choose(cluster, may_hand_over=True).receipt["candidates"]
        return next(
            float(each["hand_over_seconds"]) for each in candidates if each["replica_id"] == "p"
        )

    # Computing takes far longer than pulling.
    pulled = DECODE.seconds_per_pulled_token
    step = hand_over_seconds() - NUM_TOKENS * pulled
    assert 0 <= step < 0.1
    cluster.reports("p", replace(PREFILL, max_chunk_tokens=512))
    assert hand_over_seconds() == pytest.approx(512 * pulled + step, abs=1e-5)
    cluster.reports("p", replace(PREFILL, max_chunk_tokens=1 << 20))
    assert hand_over_seconds() == pytest.approx(NUM_TOKENS * pulled + step, abs=1e-5)


def test_nothing_is_pulled_beside_a_prompt_that_need_not_be_computed(cluster: Cluster) -> None:
    cluster.reports("p", replace(PREFILL, max_chunk_tokens=16))
    pulled = 0.0002
    for name in "de":
        cluster.reports(name, replace(BUSY, seconds_per_pulled_token=pulled))
    cluster.caches("p", PROMPT)
    candidates = choose(cluster, may_hand_over=True).receipt["candidates"]
    [found] = [each for each in candidates if each["replica_id"] == "p"]
    assert found["own_seconds"] < 0.02
    assert found["hand_over_seconds"] > NUM_TOKENS * pulled - 0.02


def test_an_answer_that_is_lost_is_split_as_a_prompt_is(cluster: Cluster) -> None:
    """Its engine has died, and nothing that was computed of it is left."""
    cluster.caches("d", PROMPT)
    failed = cluster.replicas["d"].replica_id, cluster.replicas["d"].epoch
    decision = choose(cluster, numerics_id="n", exclude={failed}, may_hand_over=True)
    assert (decision.replica_id, decision.hands_over) == ("p", True)
    assert decision.successor is not None
    assert decision.successor.replica_id == "e"
    # Blocks of the engine that died come from nowhere.
    assert decision.holder is None
    seconds = {each["replica_id"]: each["own_seconds"] for each in decision.receipt["candidates"]}
    assert seconds["e"] == seconds["p"] > 10 * seconds["d"]


def test_it_is_not_where_nothing_runs(cluster: Cluster) -> None:
    for name in "de":
        cluster.reports(name, DECODE)
    decision = choose(cluster, may_hand_over=True)
    assert decision.replica_id in "de"
    assert decision.hands_over is False


def test_a_prompt_cached_at_the_decode_engine_is_not_handed_over(cluster: Cluster) -> None:
    cluster.caches("d", PROMPT)
    assert choose(cluster, may_hand_over=True).replica_id == "d"


def test_a_prompt_that_would_be_computed_twice_is_not_handed_over(cluster: Cluster) -> None:
    """Engines that cannot pull do not go on behind others."""
    for name in "de":
        cluster.reports(name, replace(IDLE, role="decode", num_running=8))
    assert choose(cluster, may_hand_over=True).hands_over is False


def test_a_request_that_cannot_be_handed_over_stays(cluster: Cluster) -> None:
    decision = choose(cluster, may_hand_over=False)
    assert (decision.replica_id, decision.hands_over) == ("p", False)


def test_where_no_other_is_left_each_does_all_of_it(cluster: Cluster) -> None:
    for name in "de":
        cluster.reports(name, BUSY, draining=True)
    decision = choose(cluster, may_hand_over=True)
    assert (decision.replica_id, decision.hands_over) == ("p", False)
    assert goes_on(cluster).replica_id == "p"
    cluster.reports("p", PREFILL, draining=True)
    with pytest.raises(Unavailable):
        choose(cluster)


def test_an_answer_that_lost_its_decode_engines_goes_back(cluster: Cluster) -> None:
    failed = [(name, cluster.replicas[name].epoch) for name in "de"]
    decision = goes_on(cluster, exclude=failed)
    assert (decision.replica_id, decision.holder) == ("p", None)


def test_roles_change_with_the_next_load_message(cluster: Cluster) -> None:
    cluster.reports("p", replace(IDLE, role="both"))
    decision = choose(cluster, may_hand_over=True)
    assert (decision.replica_id, decision.hands_over) == ("p", False)
    assert goes_on(cluster).replica_id == "p"


def test_a_replica_that_pulls_fast_is_as_good_as_one_that_has_the_prefix(cluster: Cluster) -> None:
    """Without roles: the holder is busy, and pulling costs less than waiting for it or
    computing."""
    for name in "de":
        cluster.reports(name, replace(IDLE, seconds_per_pulled_token=0.00001))
    cluster.reports("p", replace(IDLE, num_prefill_tokens=2000))
    cluster.caches("p", PROMPT)
    decision = choose(cluster)
    assert decision.replica_id in "de"
    assert decision.holder is not None
    assert decision.predicted_seconds < 0.1
    for name in "de":
        cluster.reports(name, IDLE)
    assert choose(cluster).replica_id == "p"
