"""Nodes on which the chart lets pods run."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from tests.deploy.chart import applied, refusals
from tests.deploy.kube_api import Object
from tests.deploy.test_chart import pods, stage_of

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

pytestmark = pytest.mark.long

FRONT = {"gateway": "gateway", "processor": "processor", "outputProcessor": "output-processor"}
"""Stages without engines, by the name of their values."""
PREFERRED = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
}


def pods_by_stage(objects: list[Object]) -> dict[str, Object]:
    return {stage_of(workload): pod for workload, pod in pods(objects)}


def own_pods(stage: str) -> Object:
    """What a constraint counts: the stage's pods of one rollout."""
    labels = {"name": "headwater", "instance": "hw", "component": stage}
    selector = {
        "matchLabels": {f"app.kubernetes.io/{name}": value for name, value in labels.items()}
    }
    return {"labelSelector": selector, "matchLabelKeys": ["pod-template-hash"]}


def test_replicas_of_a_stage_prefer_different_nodes() -> None:
    ((objects,),) = applied([[{}]])
    found = pods_by_stage(objects)
    for stage in FRONT.values():
        assert found[stage]["topologySpreadConstraints"] == [PREFERRED | own_pods(stage)]
    assert found["engine"]["topologySpreadConstraints"] == [PREFERRED | own_pods("engine-demo")]
    assert not any(
        "topologySpreadConstraints" in found[server] for server in ("nats", "valkey", "pull")
    )


def test_a_stage_is_spread_and_placed_as_its_values_say() -> None:
    import kubernetes_validate  # noqa: PLC0415 (two seconds of every worker)

    zones = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "DoNotSchedule",
    }
    chosen = zones | {"labelSelector": {"matchLabels": {"team": "inference"}}}
    term = {
        "labelSelector": {"matchLabels": {"noisy": "yes"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    placed: dict[str, Any] = {
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
        "topologySpreadConstraints": [zones, chosen],
    }
    engines = [
        {"name": "a", "model": "demo"} | placed,
        {"name": "b", "model": "demo", "servedModelName": "other"},
    ]
    ((objects,),) = applied([[dict.fromkeys(FRONT, placed) | {"engines": engines}]])
    spread = {
        workload["metadata"]["name"]: pod.get("topologySpreadConstraints")
        for workload, pod in pods(objects)
    }
    assert spread["hw-engine-a"] == [zones | own_pods("engine-a"), chosen]
    assert spread["hw-engine-b"] == [PREFERRED | own_pods("engine-b")]
    for workload, pod in pods(objects):
        if (stage := stage_of(workload)) in FRONT.values():
            kubernetes_validate.validate(workload, "1.34", strict=True)
            assert pod["affinity"] == placed["affinity"]
            assert pod["topologySpreadConstraints"] == [zones | own_pods(stage), chosen]


def test_the_chart_s_own_servers_run_on_the_nodes_that_values_name() -> None:
    placed = {
        server: {
            "nodeSelector": {"pool": server},
            "tolerations": [{"key": server, "operator": "Exists"}],
        }
        for server in ("nats", "valkey")
    }
    default, chosen = applied([[{}], [placed]])
    for server, values in placed.items():
        pod = pods_by_stage(chosen[0])[server]
        assert {name: pod[name] for name in values} == values
        assert values.keys().isdisjoint(pods_by_stage(default[0])[server])


def test_a_constraint_without_what_kubernetes_needs_is_refused_by_name() -> None:
    (words,) = refusals(
        [[{"processor": {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}]}}]]
    )
    assert isinstance(words, str)
    assert (
        "at '/processor/topologySpreadConstraints/0': missing property 'whenUnsatisfiable'" in words
    )
