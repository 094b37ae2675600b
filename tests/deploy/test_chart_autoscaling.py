"""What KEDA asks for each engine, and of which release."""

from __future__ import annotations

import platform
import re
from urllib.parse import quote, unquote, urlsplit

import promql_parser
import pytest

from tests.deploy.chart import applied, of_kind
from tests.deploy.kube_api import Object
from tests.deploy.test_monitoring import selectors

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

pytestmark = pytest.mark.long

PROMETHEUS = {"scaler": "prometheus", "prometheusAddress": "http://prometheus:9090"}


def triggers(objects: list[Object]) -> list[Object]:
    """Metadata of the one trigger of each ScaledObject."""
    return [
        each["spec"]["triggers"][0]["metadata"]
        for each in of_kind(objects, "ScaledObject").values()
    ]


def is_counted(query: str, labels: dict[str, str]) -> bool:
    """Whether a query sums up a series with these labels."""
    (selector,) = selectors(promql_parser.parse(query))
    return all(
        re.fullmatch(each.value, labels[each.name]) is not None
        if each.op == promql_parser.MatchOp.Re
        else each.op == promql_parser.MatchOp.Equal and each.value == labels[each.name]
        for each in selector.matchers.matchers
    )


@pytest.mark.parametrize(
    ("changed", "counted"),
    [
        ({}, True),
        # Kubernetes cuts the name of a Deployment with its hash to 58 characters, and the dash
        # behind it too.
        ({"pod": "hw-gateway-6c9f7d5b4x2x7k"}, True),
        ({"namespace": "staging"}, False),
        ({"pod": "other-gateway-6c9f7d5b4-x2x7k"}, False),
        # A release `hw-gateway` in the same namespace.
        ({"pod": "hw-gateway-gateway-6c9f7d5b4-x2x7k"}, False),
        ({"model_name": "n"}, False),
    ],
    ids=[
        "its own",
        "cut",
        "another namespace",
        "another release",
        "a longer release",
        "another model",
    ],
)
def test_prometheus_is_asked_for_gateways_of_the_release(
    prometheus_query: str, changed: dict[str, str], counted: bool
) -> None:
    own = {"namespace": "serving", "pod": "hw-gateway-6c9f7d5b4-x2x7k", "model_name": 'a "model"'}
    assert is_counted(prometheus_query, own | changed) == counted


@pytest.fixture(scope="module")
def prometheus_query() -> str:
    ((objects,),) = applied(
        [[{"keda": PROMETHEUS, "engines": [{"name": "a", "model": 'a "model"'}]}]]
    )
    (trigger,) = triggers(objects)
    query: str = trigger["query"]
    return query


def test_the_path_that_keda_asks_for_is_the_served_name_encoded() -> None:
    names = ["Qwen/Qwen3-8B", "what? now", "100%25 a+b", "a#b", "größe"]
    engines = [
        {"name": f"e{i}", "model": "m", "servedModelName": name} for i, name in enumerate(names)
    ]
    ((objects,),) = applied([[{"engines": engines}]])
    paths = [urlsplit(each["url"]).path for each in triggers(objects)]
    assert {unquote(each) for each in paths} == {f"/demand/{name}" for name in names}
    assert all(quote(unquote(each), safe="/") == each for each in paths)
    # Administrators compare with `curl GATEWAY/demand/NAME`.
    assert "/demand/Qwen/Qwen3-8B" in paths


def test_gateways_are_scaled_by_their_cpu_from_the_number_of_replicas_on() -> None:
    scaled = {"replicas": 3, "autoscaling": {"enabled": True, "maxReplicas": 9, "cpuPercent": 60}}
    (objects,), (plain,) = applied([[{"gateway": scaled}], [{}]])
    (autoscaler,) = of_kind(objects, "HorizontalPodAutoscaler").values()
    spec = autoscaler["spec"]
    assert spec["scaleTargetRef"]["name"] == "hw-gateway"
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 9)
    assert spec["metrics"][0]["resource"]["target"]["averageUtilization"] == 60
    # A number in the Deployment would undo the autoscaler's at each upgrade.
    gateway = of_kind(objects, "Deployment")["hw-gateway"]
    assert "replicas" not in gateway["spec"]
    assert "cpu" in gateway["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert of_kind(plain, "HorizontalPodAutoscaler") == {}
    assert of_kind(plain, "Deployment")["hw-gateway"]["spec"]["replicas"] == 2


def test_a_pool_of_the_inference_extension_has_the_gateways_and_the_picker_of_the_values() -> None:
    pool = {"enabled": True, "endpointPicker": {"name": "picker", "port": 9003}}
    ((objects,),) = applied([[{"inferencePool": pool}]])
    (found,) = of_kind(objects, "InferencePool").values()
    gateway = of_kind(objects, "Deployment")["hw-gateway"]["spec"]["template"]
    labels = gateway["metadata"]["labels"]
    assert found["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = [each["containerPort"] for each in gateway["spec"]["containers"][0]["ports"]]
    assert found["spec"]["targetPorts"][0]["number"] in ports
    picker = found["spec"]["endpointPickerRef"]
    assert (picker["name"], picker["port"]["number"]) == ("picker", 9003)
