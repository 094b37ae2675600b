"""Values of the chart: what values.yaml describes, what the schema takes, what is refused and by
which words."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from headwater.engine_core.weights.model_file import DTYPES
from headwater.services.runtime.role import ROLES
from tests.deploy.chart import CHART, applied, of_kind, refusals
from tests.deploy.test_chart import stages

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gatewya": {}}, "additional properties 'gatewya' not allowed"),
    ({"gateway": {"replicas": 0}}, "at '/gateway/replicas': minimum: got 0, want 1"),
    ({"engines": []}, "at '/engines'"),
    ({"engines": [{"name": "A b", "model": "m"}]}, "at '/engines/0/name'"),
    ({"nats": {"url": "http://nats"}}, "at '/nats/url'"),
    ({"keda": {"scaler": "prometheus"}}, "keda.prometheusAddress is missing"),
    ({"ingress": {"enabled": True}}, "ingress.host is missing"),
    (
        {"otlpEndpoint": "collector:4317"},
        "at '/otlpEndpoint': 'collector:4317' does not match pattern",
    ),
    ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs is empty"),
    (
        {"engines": [{"name": "a", "model": "m", "hosts": 2}]},
        "engines[0].hosts is 2; allowed: 1, or pipelineParallelSize (1), a stage for each",
    ),
    ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name is missing"),
    (
        {"gateway": {"replicas": 4, "autoscaling": {"enabled": True, "maxReplicas": 3}}},
        "gateway.autoscaling.maxReplicas is 3; allowed: gateway.replicas (4) or more",
    ),
    (
        {"engines": [{"name": "a", "model": "m", "device": "cuda"}]},
        "engines[0].resources.limits.memory is 4Gi; allowed with device cuda: 8Gi or more",
    ),
    (
        {"engineDefaults": {"device": "cuda", "resources": {"limits": {"memory": "8000M"}}}},
        "engines[0].resources.limits.memory is 8000M",
    ),
    (
        {"engineDefaults": {"role": "prefil"}},
        "at '/engineDefaults/role': value must be one of 'both', 'prefill', 'decode'",
    ),
    (
        {"engines": [{"name": "a", "model": "m", "dtype": "fp16"}]},
        "at '/engines/0/dtype': value must be one of 'auto'",
    ),
    (
        {"models": {"volume": {"accessModes": []}}},
        "at '/models/volume/accessModes': minItems: got 0, want 1",
    ),
    ({"images": {"pullSecrets": ["hub"]}}, "at '/images/pullSecrets/0': got string, want object"),
]


def test_values_that_cannot_be_are_refused_by_name() -> None:
    for words, (_, text) in zip(
        refusals([[values] for values, _ in REFUSED]), REFUSED, strict=True
    ):
        assert isinstance(words, str)
        assert text in words


def paths(
    values: dict[str, Any], schema: dict[str, Any], at: str = ""
) -> Iterator[tuple[set[str], set[str]]]:
    """At each map whose names the schema lists: paths of values.yaml, and those of the schema."""
    properties = schema.get("properties", {})
    if not values or not properties:
        return
    yield {f"{at}{name}" for name in values}, {f"{at}{name}" for name in properties}
    for name in values.keys() & properties.keys():
        if isinstance(values[name], dict):
            yield from paths(values[name], properties[name], f"{at}{name}.")


def test_values_yaml_has_each_value_of_the_schema_and_no_other() -> None:
    found = list(paths(VALUES, SCHEMA))
    # Helm passes `global` to every chart.
    assert set().union(*(schema for _, schema in found)) - {"global"} == set().union(
        *(values for values, _ in found)
    )
    of_an_entry = SCHEMA["properties"]["engines"]["items"]["properties"]
    assert of_an_entry.keys() - {"name", "model"} == VALUES["engineDefaults"].keys()
    of_a_pod = SCHEMA["properties"]["turns"]["items"]["properties"]
    own = {"name", "models", "residentGB"}
    assert of_a_pod.keys() - own == VALUES["turnsDefaults"].keys()


def test_each_value_is_read_by_a_template() -> None:
    templates = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))

    def is_read(path: str) -> bool:
        """By its name, or in a map that a template passes on whole."""
        *parents, name = path.split(".")
        whole = rf"|toYaml \.{parents[-1]}\b" if parents else ""
        return re.search(rf"\.{name}\b{whole}", templates) is not None

    described = {path for values, _ in paths(VALUES, SCHEMA) for path in values}
    assert {path for path in described if not is_read(path)} == set()


def test_an_entry_takes_the_dtypes_and_roles_of_engines() -> None:
    for each in (SCHEMA["properties"]["engines"]["items"], SCHEMA["properties"]["engineDefaults"]):
        assert set(each["properties"]["dtype"]["enum"]) == {"auto", *DTYPES}
        assert set(each["properties"]["role"]["enum"]) == set(ROLES)


@pytest.mark.long
def test_a_start_probe_may_fail_once_at_least() -> None:
    ((objects,),) = applied([[{"probes": {"startSeconds": 3, "periodSeconds": 5}}]])
    found = [container["startupProbe"]["failureThreshold"] for _, container, _ in stages(objects)]
    assert found == [1, 1, 1, 1]


@pytest.mark.long
def test_a_variable_of_the_values_takes_the_place_of_the_chart_s_own() -> None:
    env = {"HEADWATER_LOG_LEVEL": "debug", "NUMBA_CACHE_DIR": "/tmp/numba"}
    ((objects,),) = applied([[{"gateway": {"env": env}, "engineDefaults": {"env": env}}]])
    for stage, container, _ in stages(objects):
        found = [(each["name"], each.get("value")) for each in container["env"]]
        assert len(dict(found)) == len(found)
        is_given = stage in {"gateway", "engine"}
        assert dict(found)["HEADWATER_LOG_LEVEL"] == ("debug" if is_given else "info")
        assert dict(found).get("NUMBA_CACHE_DIR") == ("/tmp/numba" if is_given else None)


@pytest.mark.long
def test_whole_numbers_of_variables_and_tags_are_written_in_digits() -> None:
    env = {
        "HEADWATER_STORAGE_BYTES": 17_179_869_184,
        "HEADWATER_TRUST": 0.25,
        "HEADWATER_LOG": True,
    }
    ((objects,),) = applied([[{"gateway": {"env": env}, "images": {"front": {"tag": 20261127}}}]])
    (gateway,) = [container for stage, container, _ in stages(objects) if stage == "gateway"]
    found = {each["name"]: each.get("value") for each in gateway["env"]}
    assert [found[name] for name in env] == ["17179869184", "0.25", "true"]
    assert gateway["image"] == "headwater-front:20261127"


@pytest.mark.long
def test_an_ingress_speaks_tls_to_gateways_that_have_a_certificate() -> None:
    ingress = {"ingress": {"enabled": True, "host": "llm.example"}}
    tls = {"clientTls": {"secret": "tls"}}
    name = "nginx.ingress.kubernetes.io/backend-protocol"
    own = {"ingress": ingress["ingress"] | {"annotations": {name: "GRPCS"}}}
    found = [
        of_kind(objects, "Ingress")["hw"]["metadata"]["annotations"].get(name)
        for (objects,) in applied([[ingress], [ingress | tls], [own | tls]])
    ]
    assert found == [None, "HTTPS", "GRPCS"]


@pytest.mark.long
def test_stages_may_call_outside_servers_at_the_ports_of_their_urls() -> None:
    values = {
        "nats": {"url": "nats://gateway:secret@one.example:4333,tls://two.example"},
        "valkey": {"url": "rediss://:6381@redis.example:6380/0"},
    }
    ((objects,),) = applied([[values]])
    for stage in ("gateway", "processor", "output-processor", "engine"):
        rules = of_kind(objects, "NetworkPolicy")[f"hw-{stage}"]["spec"]["egress"]
        (ports,) = [rule["ports"] for rule in rules if {"port": 4222} in rule["ports"]]
        assert ports == [{"port": 4222}, {"port": 6379}, {"port": 4333}, {"port": 6380}]


@pytest.mark.long
def test_stages_may_call_the_collector_that_they_send_spans_to() -> None:
    ((objects,),) = applied([[{"otlpEndpoint": "http://collector.tracing:4317"}]])
    for stage in ("gateway", "processor", "output-processor", "engine"):
        assert {"ports": [{"port": 4317}]} in of_kind(objects, "NetworkPolicy")[f"hw-{stage}"][
            "spec"
        ]["egress"]


def test_only_the_paths_of_clients_are_published_unless_the_values_name_others() -> None:
    route = {"enabled": True, "parentRefs": [{"name": "public"}]}
    published = {"ingress": {"enabled": True, "host": "llm.example"}, "httpRoute": route}
    whole = {
        "ingress": published["ingress"] | {"paths": ["/"]},
        "httpRoute": route | {"paths": ["/"]},
    }
    for values, allowed in ((published, VALUES["ingress"]["paths"]), (whole, ["/"])):
        ((objects,),) = applied([[values]])
        [rule] = of_kind(objects, "Ingress")["hw"]["spec"]["rules"]
        assert [each["path"] for each in rule["http"]["paths"]] == allowed
        [rule] = of_kind(objects, "HTTPRoute")["hw"]["spec"]["rules"]
        assert [each["path"]["value"] for each in rule["matches"]] == allowed
    outside = VALUES["ingress"]["paths"]
    assert {"/v1", "/health"} <= set(outside)
    assert not {"/", "/admin", "/metrics", "/demand", "/console"} & set(outside)


@pytest.mark.long
def test_pods_have_the_labels_and_the_account_of_the_values_and_names_begin_as_they_say() -> None:
    values = {
        "fullnameOverride": "llm",
        "podLabels": {"team": "search"},
        "serviceAccountName": "pulls-images",
    }
    ((objects,),) = applied([[values]])
    templates = [each["spec"]["template"] for each in objects if "template" in each.get("spec", {})]
    assert len(templates) >= 6
    for each in templates:
        assert each["metadata"]["labels"]["team"] == "search"
        assert each["spec"]["serviceAccountName"] == "pulls-images"
        assert each["spec"]["automountServiceAccountToken"] is False
    assert all(each["metadata"]["name"].startswith("llm") for each in objects)
    selectors = [
        each["spec"]["selector"]["matchLabels"] for each in objects if each["kind"] == "Deployment"
    ]
    assert all("team" not in each for each in selectors), "a label may change, a selector may not"
