"""A pod of the chart in which models take turns: it runs `headwater up`, beside servers of its
own."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import typer

from headwater.services.cli.__main__ import app
from headwater.services.stack.settings import StackSettings
from tests.deploy.chart import applied, of_kind, refusals
from tests.deploy.kube_api import Object

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

LARGE: dict[str, Any] = {
    "name": "large",
    "models": ["qwen=Qwen/Qwen3-8B", "llama=meta-llama/Llama-3.1-8B"],
    "residentGB": 100,
    "args": ["--max-model-len=32768"],
    "env": {"HEADWATER_MAX_NUM_SEQS": 256},
}
SMALL = {"name": "small", "models": ["a=one", "b=two"], "residentGB": 0.5, "device": "cpu"}
ASKED = (
    *("model", "resident", "device", "host", "port", "nats_url", "max_model_len"),
    *("api_key_file", "drain_limit", "cold_start_timeout"),
)
"""Settings of `up` that the tests read or that bear on each other."""
VALUES = {
    "turns": [LARGE, SMALL],
    "clientTls": {"secret": "client-tls"},
    "models": {"huggingFaceSecret": "hub"},
    "networkPolicy": {"clients": [{"podSelector": {}}]},
}


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    ((found,),) = applied([[VALUES]])
    return found


def pod_of(objects: list[Object], name: str) -> dict[str, Object]:
    """Containers by name."""
    pod = of_kind(objects, "StatefulSet")[f"hw-turns-{name}"]["spec"]["template"]["spec"]
    return {each["name"]: each for each in pod["containers"]}


def settings_of(up: Object, keys: Path) -> StackSettings:
    """Settings that the command makes of the container's arguments, where the file of keys is
    another one, and certificates are none."""
    assert up["command"] == ["headwater", "up"]
    command = typer.main.get_command(app).commands["up"]  # type: ignore[attr-defined]
    arguments = [each for each in up["args"] if not each.startswith("--tls-")]
    given = command.make_context("up", arguments).params | {"api_key_file": keys}
    return StackSettings(**{name: given[name] for name in ASKED})


def test_every_object_is_valid_for_kubernetes(objects: list[Object]) -> None:
    import kubernetes_validate  # noqa: PLC0415 (two seconds of every worker)

    ours = [each for each in objects if "-turns-" in each["metadata"]["name"]]
    assert {each["kind"] for each in ours} == {"StatefulSet", "Service", "NetworkPolicy"}
    for each in ours:
        kubernetes_validate.validate(each, "1.34", strict=True)


def test_the_pod_runs_models_in_turns_on_its_device(objects: list[Object], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("local 0123456789abcdef\n")
    large, small = (settings_of(pod_of(objects, name)["up"], keys) for name in ("large", "small"))
    assert list(large.model) == LARGE["models"]
    assert (large.resident_bytes, large.device, large.max_model_len) == (100e9, "cuda", 32768)
    assert (small.resident_bytes, small.device) == (500e6, "cpu")
    limits = [pod_of(objects, name)["up"]["resources"].get("limits") for name in ("large", "small")]
    assert limits == [{"nvidia.com/gpu": 1}, None]


def test_clients_reach_its_gateway_with_the_keys_of_the_release_and_nothing_else(
    objects: list[Object],
) -> None:
    pod = pod_of(objects, "large")
    service = of_kind(objects, "Service")["hw-turns-large"]["spec"]
    assert [each["targetPort"] for each in service["ports"]] == ["rest", "grpc"]
    assert [each["name"] for each in pod["up"]["ports"]] == ["rest", "grpc"]
    for server in ("nats", "valkey"):
        assert "127.0.0.1" in pod[server]["args"]
        assert "ports" not in pod[server]
    policy = of_kind(objects, "NetworkPolicy")["hw-turns-large"]["spec"]
    assert policy["podSelector"]["matchLabels"] == service["selector"]
    assert policy["ingress"][0]["from"] == [{"podSelector": {}}]
    assert "--api-key-file=/keys/api-keys" in pod["up"]["args"]
    secrets = of_kind(objects, "Secret")
    for each in pod["up"]["env"]:
        if "secretKeyRef" in each.get("valueFrom", {}) and each["name"] != "HF_TOKEN":
            key = each["valueFrom"]["secretKeyRef"]
            assert key["key"] in secrets[key["name"]]["data"]


def test_entries_that_cannot_be_are_refused_by_name() -> None:
    refused = [
        ({"turns": [SMALL, SMALL]}, 'turns[1].name is "small", as that of turns[0]'),
        ({"turns": [SMALL | {"models": ["a"]}]}, "at '/turns/0/models': minItems: got 1, want 2"),
        ({"turns": [{"name": "a", "models": ["a", "b"]}]}, "missing property 'residentGB'"),
    ]
    for words, (_, text) in zip(refusals([[each] for each, _ in refused]), refused, strict=True):
        assert isinstance(words, str)
        assert text in words
