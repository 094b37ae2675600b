"""Engines over several hosts: a LeaderWorkerSet whose leader is the engine and whose workers are
the stages that join it."""

from __future__ import annotations

import platform
from typing import Any

import kubernetes_validate
import pytest

from headwater.services.engine.programs.stage_host import StageSettings
from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime.settings import read_settings
from tests.deploy.chart import applied, of_kind
from tests.deploy.kube_api import Object

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

pytestmark = pytest.mark.long

HOSTS = 3
ENGINES: list[dict[str, Any]] = [
    {
        "name": "large",
        "model": "m",
        "device": "cuda",
        "hosts": HOSTS,
        "pipelineParallelSize": HOSTS,
        "tensorParallelSize": 4,
        "resources": {"limits": {"memory": "64Gi"}},
    },
    {"name": "small", "model": "n"},
]


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    ((objects,),) = applied([[{"engines": ENGINES}]])
    return objects


@pytest.fixture
def group(objects: list[Object]) -> Object:
    found: Object = of_kind(objects, "LeaderWorkerSet")["hw-engine-large"]["spec"]
    return found


def pods(group: Object) -> list[Object]:
    template = group["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def test_a_replica_is_a_pod_of_the_engine_and_one_for_each_other_stage(
    objects: list[Object], group: Object
) -> None:
    assert set(of_kind(objects, "Deployment")) >= {"hw-engine-small"}
    assert "hw-engine-large" not in of_kind(objects, "Deployment")
    assert group["leaderWorkerTemplate"]["size"] == HOSTS
    for pod in pods(group):
        named = {"apiVersion": "v1", "kind": "Pod", **pod}
        named["metadata"] = {"name": "pod", **pod["metadata"]}
        kubernetes_validate.validate(named, "1.34", strict=True)
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    # Its number of replicas follows demand, by the scale of the group.
    target = of_kind(objects, "ScaledObject")["hw-engine-large"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "hw-engine-large",
    }
    assert "replicas" not in group


def test_the_stages_join_the_port_on_which_their_engine_listens(group: Object) -> None:
    leader, worker = (pod["spec"]["containers"][0] for pod in pods(group))
    arguments = [
        each.replace("$(HEADWATER_HOST)", "10.0.0.1").replace("$(LWS_LEADER_ADDRESS)", "leader")
        for each in leader["args"]
    ]
    engine = read_settings(EngineSettings, arguments, env={})
    assert (engine.stage_hosts, engine.pipeline_parallel_size) == (HOSTS - 1, HOSTS)
    assert worker["command"] == ["headwater", "serve", "stage"]
    joined = [each.replace("$(LWS_LEADER_ADDRESS)", "leader") for each in worker["args"]]
    stage = read_settings(StageSettings, joined, env={})
    assert engine.stage_listen.rpartition(":")[2] == stage.join.rpartition(":")[2]
    assert engine.model_folder == stage.model_folder
    assert engine.stage_secret_file == stage.stage_secret_file


def test_their_secret_is_drawn_and_copied_to_a_file_of_the_user_alone(
    objects: list[Object], group: Object
) -> None:
    secret = of_kind(objects, "Secret")["hw-stages"]
    assert len(secret["data"]["stage-secret"]) >= 48
    for pod in pods(group):
        copies = next(
            each for each in pod["spec"]["initContainers"] if each["name"] == "stage-secret"
        )
        assert copies["command"][-1].startswith("umask 077; ")
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        assert volumes["stage-secret"]["secret"]["secretName"] == "hw-stages"
        assert volumes["stage"]["emptyDir"]["medium"] == "Memory"


def test_stages_reach_every_port_of_each_other_and_only_engines_do(objects: list[Object]) -> None:
    policy = of_kind(objects, "NetworkPolicy")["hw-engine"]["spec"]
    open_to = [rule["from"] for rule in policy["ingress"] if "ports" not in rule]
    (peers,) = open_to
    assert [each["podSelector"]["matchLabels"]["headwater/stage"] for each in peers] == ["engine"]
    assert [rule["to"] for rule in policy["egress"] if "ports" not in rule] == [peers]
    ((plain,),) = applied([[{}]])
    policy = of_kind(plain, "NetworkPolicy")["hw-engine"]["spec"]
    assert all("ports" in rule for rule in [*policy["ingress"], *policy["egress"]])
    assert "hw-stages" not in of_kind(plain, "Secret")
