"""An engine's row, of what several gateways think of it."""

from __future__ import annotations

from dataclasses import replace

from headwater.gateway.live.findings import Finding, process_findings, replica_findings
from headwater.gateway.live.gateway_figures import GatewayFigures
from headwater.gateway.live.merged_figures import merge
from headwater.gateway.live.replica_rows import replica_rows, standings
from headwater.services.runtime.served_model import ServedModel
from tests.gateway.router.test_router import IDLE, Cluster, chain


def figures(name: str, gateway: Cluster, lag: float) -> GatewayFigures:
    seen = {
        life: {name: standing} for life, standing in standings(gateway.router, gateway.now).items()
    }
    return GatewayFigures(name, {}, {}, {}, [], [], {}, standings=seen, event_lags={name: lag})


async def test_the_least_trust_counts_and_a_finding_names_the_gateway_that_doubts(
    served_model: ServedModel,
) -> None:
    first = Cluster(served_model, "ab")
    second = Cluster(served_model, "ab")
    second.replicas = first.replicas
    async with first.router.running(), second.router.running():
        for gateway in (first, second):
            for name in "ab":
                gateway.reports(
                    name, replace(IDLE, kv_bytes={"full": 64, "state": 32}, num_held_bytes=9)
                )
                gateway.caches(name, [])
        second.caches("b", chain("x", 20))
        for _ in range(8):
            dispatch = second.router.dispatches.begin(
                second.choose(chain("x", 24), exclude=("a",)), "r"
            )
            second.router.dispatches.started(dispatch, 0)
            second.router.dispatches.finished(dispatch)
        for _ in range(3):
            second.router.dispatches.finished(
                second.router.dispatches.begin(second.choose([], exclude=("b",)), "f"), failed=True
            )
        merged = merge([figures("first", first, 0.001), figures("second", second, 0.5)])
        a, b = replica_rows(first.router, {}, merged.standings, first.now)
        (alone, _) = replica_rows(
            first.router, {}, merge([figures("first", first, 0.0)]).standings, first.now
        )
    assert a["kv_bytes"] == {"full": 64, "state": 32}
    assert a["num_held_bytes"] == 9
    assert (b["trust"], b["is_doubted"]) == (0.43, True)
    assert {name: each["trust"] for name, each in b["gateways"].items()} == {
        "first": 1.0,
        "second": 0.43,
    }
    assert (a["trust"], a["state"], alone["state"]) == (1.0, "failing", "serving")
    assert merged.event_lags == {"first": 0.001, "second": 0.5}
    assert "b is trusted at 43% by second" in [each.what for each in replica_findings([a, b])]


def test_missing_services_of_another_process_are_found() -> None:
    (finding,) = process_findings(
        [{"id": "other", "without": ["redis"]}, {"id": "well", "without": []}]
    )
    assert isinstance(finding, Finding)
    assert (finding.level, finding.what) == ("warning", "other is without redis")
    assert "Redis" in finding.advice
