"""The Helm chart: what it makes is valid, runs what the code has, and keeps what it draws."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater.gateway.settings import GatewaySettings
from headwater.services.engine.settings import EngineSettings
from headwater.services.output_processor.__main__ import OutputProcessorSettings
from headwater.services.processor.__main__ import ProcessorSettings
from headwater.services.runtime.settings import read_settings
from headwater.services.stack.roles import NATS_RIGHTS, VALKEY_RIGHTS
from tests.deploy.chart import CHART, applied, of_kind
from tests.deploy.kube_api import Object

# Where it is built for, a library that does not load is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "gateway": GatewaySettings,
    "processor": ProcessorSettings,
    "output-processor": OutputProcessorSettings,
    "engine": EngineSettings,
}
PINNED_NATS = "nats:{tag}@{digest}".format(
    **yaml.safe_load((CHART / "values.yaml").read_text())["images"]["nats"]
)
OF_OTHERS = {
    *("ScaledObject", "LeaderWorkerSet", "HTTPRoute", "GRPCRoute", "InferencePool"),
    *("PodMonitor", "PrometheusRule"),
}
"""Kinds that are no part of Kubernetes itself; no schemas of them are at hand."""
TWO_MODELS = [
    {"name": "small", "model": "smollm2-135m-instruct"},
    {
        "name": "large",
        "model": "Qwen/Qwen3-8B",
        "servedModelName": "qwen: 8B",
        "revision": "main",
        "device": "cuda",
        "gpus": 1,
        "minReplicas": 2,
        "maxReplicas": 2,
        "args": ["--kv-cache-dtype=fp8"],
        "sharedPrompts": {"0" * 63 + "a": ["ada", "bob"]},
        "env": {"HEADWATER_MAX_NUM_SEQS": 256},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "resources": {"limits": {"memory": "64Gi"}},
        "image": {"tag": "0.2.0-cuda"},
    },
]
ADDED: dict[str, Any] = {
    "envFrom": [{"configMapRef": {"name": "ours"}}],
    "extraVolumes": [{"name": "ours", "configMap": {"name": "ours"}}],
    "extraVolumeMounts": [{"name": "ours", "mountPath": "/ours", "readOnly": True}],
}
"""Values of a stage that add to its pods."""
VALUE_SETS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "two models": {
        "engines": TWO_MODELS,
        "images": {"registry": "registry.example"},
        "models": {"huggingFaceSecret": "hub"},
        "kernelCache": {"shared": False},
    },
    "servers and secrets of others": {
        "nats": {"url": "tls://nats.example:4222"},
        "valkey": {"url": "rediss://redis.example:6379"},
        "access": {"existingSecrets": "ours"},
        "models": {"volume": {"existingClaim": "weights"}},
        "keda": {"enabled": False},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {}}],
            "extraEgress": [{"ports": [{"port": 4317}]}],
        },
    },
    "certificates and routes": {
        "stageTls": {"secret": "stage-tls"},
        "clientTls": {"secret": "client-tls"},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "llm.example",
            "tlsSecret": "llm-tls",
        },
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "outer"}],
            "hostnames": ["llm.example"],
            "grpcHostnames": ["grpc.llm.example"],
        },
        "gateway": {"autoscaling": {"enabled": True}},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
        "keda": {"scaler": "prometheus", "prometheusAddress": "http://prometheus:9090"},
        "networkPolicy": {"clients": [{"podSelector": {}}]},
        "otlpEndpoint": "http://collector:4317",
        "priorityClassName": "serving",
        "podAnnotations": {"team": "inference"},
    },
    "long drains and additions": {
        "gateway": {"preStopSeconds": 30, "drainSeconds": 900, **ADDED},
        "processor": {"drainSeconds": 45, **ADDED},
        "outputProcessor": {"drainSeconds": 300, **ADDED},
        "engineDefaults": {"drainSeconds": 600, **ADDED},
        "serviceAccount": {"create": True, "annotations": {"role": "reader"}},
        "images": {"front": {"digest": f"sha256:{'0' * 64}"}},
    },
}


@pytest.fixture(scope="module")
def installs() -> dict[str, list[Object]]:
    """What each of the value sets makes."""
    made = applied([[values] for values in VALUE_SETS.values()])
    return {name: objects for name, (objects,) in zip(VALUE_SETS, made, strict=True)}


@pytest.fixture(params=VALUE_SETS)
def objects(request: pytest.FixtureRequest, installs: dict[str, list[Object]]) -> list[Object]:
    return installs[request.param]


def pods(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Workloads with the specifications of their pods."""
    for each in objects:
        if each["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield each, each["spec"]["template"]["spec"]


def stage_of(workload: Object) -> str:
    stage: str = workload["metadata"]["labels"]["app.kubernetes.io/component"]
    return "engine" if stage.startswith("engine-") else stage


def stages(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Of Headwater's own: the stage, its container and the specification of its pod."""
    for workload, pod in pods(objects):
        if (stage := stage_of(workload)) in SETTINGS:
            (container,) = pod["containers"]
            yield stage, container, pod


def decoded(secret: Object) -> dict[str, str]:
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}


def test_every_object_is_valid_for_kubernetes(objects: list[Object]) -> None:
    import kubernetes_validate  # noqa: PLC0415 (two seconds of every worker)

    for each in objects:
        if each["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(each, "1.34", strict=True)


def test_every_flag_and_variable_of_a_stage_is_one_of_its_settings(objects: list[Object]) -> None:
    seen = set()
    for stage, container, _ in stages(objects):
        assert container["command"] == ["headwater", "serve", stage]
        env = {each["name"]: each.get("value", "10.0.0.1") for each in container["env"]}
        # The addresses come from the role's secret.
        secrets = {"HEADWATER_NATS_URL": "nats://n", "HEADWATER_ADMIN_KEY": "0123456789abcdef"}
        settings = read_settings(SETTINGS[stage], container["args"], env | secrets)
        # `kubectl port-forward` connects to the pod's loopback address, at which only gateways
        # listen.
        assert settings.host == ("::" if stage == "gateway" else "10.0.0.1")
        ours = {name for name in env if name.startswith("HEADWATER_")}
        assert ours <= {f"HEADWATER_{name.upper()}" for name in type(settings).__dataclass_fields__}
        seen.add(stage)
    assert seen == SETTINGS.keys()


def test_a_variable_of_an_engine_wins_over_what_the_chart_sets_on_gpus(
    installs: dict[str, list[Object]],
) -> None:
    (on_gpu,) = [
        each for stage, each, _ in stages(installs["two models"]) if "--device=cuda" in each["args"]
    ]
    env = {each["name"]: each.get("value", "10.0.0.1") for each in on_gpu["env"]}
    settings = read_settings(EngineSettings, on_gpu["args"], env)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (256, 2048)


def test_a_gpu_runs_no_more_requests_than_a_step_has_tokens() -> None:
    env = {"HEADWATER_MAX_NUM_BATCHED_TOKENS": 256}
    memory = {"limits": {"memory": "32Gi"}}
    engine = {"name": "demo", "model": "qwen3-8b", "device": "cuda", "resources": memory}
    [[objects]] = applied([[{"engines": [engine | {"env": env}]}]])
    (container,) = [container for stage, container, _ in stages(objects) if stage == "engine"]
    assert "--max-num-seqs=256" in container["args"]


def test_system_messages_that_tenants_share_are_declared_to_gateways(
    installs: dict[str, list[Object]],
) -> None:
    for name, objects in installs.items():
        (args,) = (each["args"] for stage, each, _ in stages(objects) if stage == "gateway")
        declared = [arg for arg in args if arg.startswith("--shared-prompt")]
        expected = [f"--shared-prompt=qwen: 8B={'0' * 63}a:ada+bob"]
        assert declared == (expected if name == "two models" else [])


def test_a_model_is_served_from_the_folder_that_its_job_links(objects: list[Object]) -> None:
    jobs = [pod["containers"][0] for workload, pod in pods(objects) if workload["kind"] == "Job"]
    links = {next(each[7:] for each in job["args"] if each.startswith("--link=")) for job in jobs}
    for stage, container, pod in stages(objects):
        folders = {each[15:] for each in container["args"] if each.startswith("--model-folder=")}
        if stage == "gateway":
            continue
        assert folders == links if stage != "engine" else folders < links or folders == links
        (waiting,) = pod["initContainers"]
        assert set(waiting["args"]) == folders
        (models,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/models"]
        assert models["readOnly"]


def test_blocks_have_one_size_on_the_stages_that_hash_and_that_cache_them(
    objects: list[Object],
) -> None:
    sizes = [
        each
        for _, container, _ in stages(objects)
        for each in container["args"]
        if "--block-size=" in each
    ]
    assert len(sizes) >= 2
    assert len(set(sizes)) == 1


def test_no_container_is_root_or_writes_its_image(objects: list[Object]) -> None:
    for _, pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        assert not pod["enableServiceLinks"]
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def ends(container: Object, pod: Object) -> tuple[int, int, int]:
    """Seconds of its hook, of its drain limit, and until it is killed."""
    hook = (
        container.get("lifecycle", {})
        .get("preStop", {})
        .get("exec", {})
        .get("command", ["sleep", "0"])
    )
    assert hook[0] == "sleep"
    drain = next(
        int(each["value"]) for each in container["env"] if each["name"] == "HEADWATER_DRAIN_LIMIT"
    )
    return int(hook[1]), drain, pod["terminationGracePeriodSeconds"]


def test_a_pod_has_longer_to_end_than_its_hook_and_its_drain_take(objects: list[Object]) -> None:
    for _, container, pod in stages(objects):
        waits, drain, given = ends(container, pod)
        assert given >= waits + drain + 10


def test_each_stage_drains_for_as_long_as_values_say(installs: dict[str, list[Object]]) -> None:
    found = {
        stage: ends(container, pod)[:2]
        for stage, container, pod in stages(installs["long drains and additions"])
    }
    assert found == {
        "gateway": (30, 900),
        "processor": (0, 45),
        "output-processor": (0, 300),
        "engine": (0, 600),
    }


def test_stages_behind_a_service_wait_for_proxies_and_no_others_do(objects: list[Object]) -> None:
    services = [each["spec"]["selector"].items() for each in of_kind(objects, "Service").values()]
    for workload, pod in pods(objects):
        if workload["kind"] != "Deployment":
            # The only pod behind its service: proxies have no other one to send to.
            assert not any("lifecycle" in each for each in pod["containers"])
            continue
        labels = workload["spec"]["template"]["metadata"]["labels"].items()
        (container,) = pod["containers"]
        assert (ends(container, pod)[0] > 0) == any(selector <= labels for selector in services)


def test_the_documentation_names_the_times_in_which_pods_end(
    installs: dict[str, list[Object]],
) -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    for stage, container, pod in stages(installs["as it comes"]):
        waits, drain, given = ends(container, pod)
        hook = f"`sleep {waits}`" if waits else "none"
        assert f"| {stage.replace('-', ' ')} | {hook} | {drain} s | {given} s |" in page


def test_the_documentation_pushes_the_images_that_the_chart_pulls(
    installs: dict[str, list[Object]],
) -> None:
    pulled = {container["image"] for _, container, _ in stages(installs["two models"])}
    page = (ROOT / "docs/tutorial_kubernetes.md").read_text()
    (images,) = re.findall(r"for image in ([^;]+);", page)
    (tag,) = re.findall(r"docker push registry\.example/headwater-\$image:(\S+)", page)
    pushed = {f"registry.example/headwater-{image}" for image in images.split()}
    assert f"registry.example/headwater-front:{tag}" in pulled
    # One model names another tag.
    assert {image.rpartition(":")[0] for image in pulled} <= pushed


def test_a_stage_that_loads_for_an_hour_is_not_started_again(objects: list[Object]) -> None:
    for _, container, _ in stages(objects):
        probe = container["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] >= 3600


def test_a_pod_gets_the_secrets_of_its_own_role(objects: list[Object]) -> None:
    for stage, container, pod in stages(objects):
        refs = [each["secretRef"] for each in container["envFrom"] if "secretRef" in each]
        names = {each["name"].split("-", 1)[1] for each in refs}
        assert names == {stage}
        mounted = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
        keys = {name for name in mounted if name.endswith("-keys")}
        assert len(keys) == (stage == "gateway")
        assert mounted - keys <= {"stage-tls", "client-tls"}


def test_engines_follow_demand_and_gateways_their_cpu_and_nothing_else_is_scaled(
    objects: list[Object],
) -> None:
    deployments = of_kind(objects, "Deployment")
    scaled = {
        each["spec"]["scaleTargetRef"]["name"] for each in of_kind(objects, "ScaledObject").values()
    }
    assert all("-engine-" in name for name in scaled)
    # Gateways follow their CPU where the values ask for it.
    scaled |= {
        each["spec"]["scaleTargetRef"]["name"]
        for each in of_kind(objects, "HorizontalPodAutoscaler").values()
    }
    assert {name for name, each in deployments.items() if "replicas" not in each["spec"]} == scaled
    assert all(each["spec"].get("replicas", 1) >= 1 for each in deployments.values())


def test_each_stage_has_a_budget_that_lets_nodes_be_drained(objects: list[Object]) -> None:
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert budgets.keys() == of_kind(objects, "Deployment").keys()
    for name, budget in budgets.items():
        labels = of_kind(objects, "Deployment")[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert budget["spec"]["maxUnavailable"] == 1


def test_the_rights_in_nats_and_valkey_are_those_of_the_roles() -> None:
    rights = json.loads((CHART / "files/rights.json").read_text())
    assert rights == {
        "nats": {
            role.value: {"publish": list(each.publish), "subscribe": list(each.subscribe)}
            for role, each in NATS_RIGHTS.items()
        },
        "valkey": {role.value: rules for role, rules in VALKEY_RIGHTS.items()},
    }


def test_metrics_are_scraped_under_the_job_that_alerts_name(
    installs: dict[str, list[Object]],
) -> None:
    objects = installs["certificates and routes"]
    (monitor,) = of_kind(objects, "PodMonitor").values()
    jobs = {
        each["spec"]["template"]["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        for each in of_kind(objects, "Deployment").values()
    }
    assert jobs == set(
        re.findall(r'job="([^"]*)"', (ROOT / "deploy/helm/headwater/files/rules.yaml").read_text())
    )


def test_alerts_and_the_dashboard_are_those_of_the_files(
    installs: dict[str, list[Object]],
) -> None:
    files = ROOT / "deploy/helm/headwater/files"
    objects = installs["certificates and routes"]
    (rule,) = of_kind(objects, "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((files / "rules.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (dashboard,) = of_kind(objects, "ConfigMap").values()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["data"] == {"headwater.json": (files / "dashboard.json").read_text()}
    assert not of_kind(installs["as it comes"], "PrometheusRule")


def test_the_servers_know_the_passwords_that_stages_have(installs: dict[str, list[Object]]) -> None:
    secrets = {
        name: decoded(each) for name, each in of_kind(installs["as it comes"], "Secret").items()
    }
    # NATS reads JSON, but none of its escapes of characters by number.
    assert "\\u" not in secrets["hw-nats"]["nats.conf"]
    users = {
        each["user"]: each
        for each in json.loads(secrets["hw-nats"]["nats.conf"])["authorization"]["users"]
    }
    tokens = set()
    for role in SETTINGS:
        tokens.add(secrets[f"hw-{role}"]["HEADWATER_CLUSTER_TOKEN"])
        nats = re.fullmatch(
            rf"nats://{role}:(\w+)@hw-nats:4222", secrets[f"hw-{role}"]["HEADWATER_NATS_URL"]
        )
        assert nats is not None
        assert users[role]["password"] == nats[1]
        redis = secrets[f"hw-{role}"].get("HEADWATER_REDIS_URL")
        assert (redis is None) == (role in {"processor", "output-processor"})
        if redis is not None:
            assert redis == f"redis://{role}:{nats[1]}@hw-valkey:6379"
            digest = hashlib.sha256(nats[1].encode()).hexdigest()
            assert f"user {role} on #{digest} " in secrets["hw-valkey"]["users.acl"]
    assert len(tokens) == 1
    assert len(tokens.pop()) >= 32


CALLS = {"processors": "processor", "output processors": "output-processor", "engines": "engine"}


def test_network_policies_are_the_table_of_the_security_model(
    installs: dict[str, list[Object]],
) -> None:
    policies = of_kind(installs["as it comes"], "NetworkPolicy")
    table = re.findall(
        r"^\| (gateway|processor|output processor|engine) \| ([^|]+) \|.*\| ([^|]+) \|$",
        (ROOT / "docs/security.md").read_text(),
        re.M,
    )
    assert len(table) == 4
    for role, calls, redis in table:
        reported = {CALLS[each] for each in calls.strip().split(", ") if each in CALLS}
        store = set() if redis.strip() == "no access" else {"valkey"}
        allowed = peers(policies[f"hw-{role.replace(' ', '-')}"]["spec"]["egress"], "to")
        assert allowed == reported | store | {"nats"}
    for name in ("processor", "output-processor", "engine", "nats", "valkey"):
        callers = {
            role
            for role in SETTINGS
            if name in peers(policies[f"hw-{role}"]["spec"]["egress"], "to")
        }
        assert peers(policies[f"hw-{name}"]["spec"]["ingress"], "from") == callers


def peers(rules: list[Object], end: str) -> set[str]:
    """Stages of the release that rules name."""
    labels = [
        each["podSelector"]["matchLabels"]
        for rule in rules
        for each in rule.get(end, [])
        if "podSelector" in each
    ]
    return {each.get("headwater/stage") or each["app.kubernetes.io/component"] for each in labels}


def test_an_engine_has_the_image_of_its_device(installs: dict[str, list[Object]]) -> None:
    images = {
        stage_name: pod["containers"][0]["image"]
        for workload, pod in pods(installs["two models"])
        if (stage_name := workload["metadata"]["name"]).startswith(
            ("hw-engine", "hw-gateway", "hw-nats")
        )
    }
    assert images == {
        "hw-gateway": "registry.example/headwater-front:0.2.0",
        "hw-engine-small": "registry.example/headwater-engine-cpu:0.2.0",
        "hw-engine-large": "registry.example/headwater-engine:0.2.0-cuda",
        "hw-nats": PINNED_NATS,
    }


def test_what_values_add_is_in_the_pods_of_each_stage(installs: dict[str, list[Object]]) -> None:
    objects = installs["long drains and additions"]
    account = of_kind(objects, "ServiceAccount")["hw"]
    assert account["metadata"]["annotations"]["role"] == "reader"
    seen = set()
    for stage, container, pod in stages(objects):
        assert pod["serviceAccountName"] == "hw"
        assert [each for each in pod["volumes"] if each["name"] == "ours"]
        assert ADDED["extraVolumeMounts"][0] in container["volumeMounts"]
        assert ADDED["envFrom"][0] in container["envFrom"]
        assert ("@sha256:000" in container["image"]) is (stage != "engine")
        seen.add(stage)
    assert seen == SETTINGS.keys()
