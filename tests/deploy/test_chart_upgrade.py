"""Changes in a cluster when a release of the chart is upgraded to other values or to another
version."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import pytest

from tests.deploy.chart import CHART, applied, of_kind
from tests.deploy.kube_api import Object
from tests.deploy.test_chart import SETTINGS, decoded, stages

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)


@pytest.fixture(scope="module")
def first() -> list[Object]:
    """Objects of a release with default values."""
    ((objects,),) = applied([[{}]])
    return objects


def others(values: list[dict[str, Any]]) -> list[list[Object]]:
    """Objects of one release for each of the values."""
    return [objects for (objects,) in applied([[each] for each in values])]


OTHER_MODELS: list[dict[str, Any]] = [
    {"engines": [{"name": "demo", "model": "gemma3-270m"}]},
    {"engineDefaults": {"revision": "v2"}},
    {"engineDefaults": {"dtype": "float32"}},
    {"images": {"engineCpu": {"tag": "0.2.0-other"}}},
]


def test_pods_of_another_model_never_start_with_the_one_that_was_there(first: list[Object]) -> None:
    made = [first, *others(OTHER_MODELS)]
    awaited = [
        {
            tuple(pod["initContainers"][0]["args"])
            for stage, _, pod in stages(objects)
            if stage != "gateway"
        }
        for objects in made
    ]
    assert [len(folders) for folders in awaited] == [1] * len(made)
    assert len(set.union(*awaited)) == len(made)


OTHER_PODS: list[dict[str, Any]] = [
    {"images": {"engineCpu": {"tag": "0.2.0-other"}}},
    {"models": {"huggingFaceSecret": "hub"}},
    {"models": {"resources": {"limits": {"memory": "16Gi"}}}},
]
"""Values that change the pod template of a job. Kubernetes refuses to change that of an existing
job."""


@pytest.mark.long
def test_a_job_whose_pod_changes_is_another_job(first: list[Object]) -> None:
    made = [first, *others(OTHER_PODS)]
    names = [name for objects in made for name in of_kind(objects, "Job")]
    assert len(set(names)) == len(made)
    assert all(len(name) <= 63 for name in names)


def test_other_rights_restart_the_servers(first: list[Object]) -> None:
    """NATS and Valkey read the access rights only when they start."""
    digest = hashlib.sha256((CHART / "files/rights.json").read_bytes()).hexdigest()[:8]
    servers = of_kind(first, "StatefulSet")
    assert servers.keys() == {"hw-nats", "hw-valkey"}
    for each in servers.values():
        assert each["spec"]["template"]["metadata"]["annotations"]["headwater/rights"] == digest


@pytest.mark.long
def test_an_upgrade_keeps_what_was_drawn_and_a_rotation_draws_passwords() -> None:
    def secrets(objects: list[Object]) -> dict[str, dict[str, str]]:
        return {name: decoded(each) for name, each in of_kind(objects, "Secret").items()}

    (made,) = applied([[{}, {}, {"access": {"rotation": 2}}]])
    drawn, upgraded, rotated = map(secrets, made)
    (annotation,) = {
        each["spec"]["template"]["metadata"]["annotations"]["headwater/rotation"]
        for each in of_kind(made[-1], "Deployment").values()
    }
    assert upgraded == drawn
    assert annotation == "2"
    changed = {
        key for key, value in rotated["hw-access"].items() if value != drawn["hw-access"][key]
    }
    assert changed == {f"password-{role}" for role in [*SETTINGS, "operator"]}
    assert rotated["hw-keys"] == drawn["hw-keys"]
