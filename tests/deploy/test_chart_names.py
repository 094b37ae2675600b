"""Names of the chart's objects where the release's and engines' are as long as Helm and the chart
allow."""

from __future__ import annotations

import platform

import pytest

from tests.deploy.chart import applied, of_kind
from tests.deploy.kube_api import Object

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

pytestmark = pytest.mark.long

RELEASE = "r" * 53
ENGINES = [{"name": f"{'e' * 19}{i}", "model": "m", "servedModelName": f"m{i}"} for i in (1, 2)]
LIMITS = {
    # The suffix that a pod's label `controller-revision-hash` has behind the name takes 11
    # characters.
    "StatefulSet": 52,
    "Service": 63,
    # Pods have the name of their job as a label.
    "Job": 63,
    # KEDA writes the name into the label `scaledobject.keda.sh/name`.
    "ScaledObject": 63,
}


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    ((made,),) = applied([[{"engines": ENGINES}]], RELEASE)
    return made


@pytest.mark.parametrize("kind", LIMITS)
def test_no_name_is_longer_than_a_label_or_address_made_of_it(
    objects: list[Object], kind: str
) -> None:
    lengths = {name: len(name) for name in of_kind(objects, kind)}
    assert lengths
    assert max(lengths.values()) <= LIMITS[kind], lengths


def test_each_engine_of_a_long_release_is_scaled_by_an_object_of_its_own(
    objects: list[Object],
) -> None:
    scaled = [
        each["spec"]["scaleTargetRef"]["name"] for each in of_kind(objects, "ScaledObject").values()
    ]
    engines = {name for name in of_kind(objects, "Deployment") if "-engine-" in name}
    assert len(engines) == 2
    assert sorted(scaled) == sorted(engines)


def test_names_that_fit_are_not_changed() -> None:
    ((objects,),) = applied([[{"engines": [ENGINES[0]]}]], "r" * 35)
    (scaled,) = of_kind(objects, "ScaledObject")
    assert scaled == f"{'r' * 35}-engine-{ENGINES[0]['name']}"
    assert len(scaled) == 63


@pytest.mark.parametrize("release", ["123", "true"])
def test_a_release_may_be_named_as_a_number_is(release: str) -> None:
    ((objects,),) = applied([[{"engines": [ENGINES[0]]}]], release)
    for made in objects:
        template = made.get("spec", {}).get("template", {}).get("metadata", {})
        for labels in (made["metadata"]["labels"], template.get("labels", {})):
            assert all(isinstance(value, str) for value in labels.values()), labels
        assert isinstance(made["metadata"]["name"], str)
