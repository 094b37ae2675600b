"""The pod of `helm test`: whom it asks, for what, and that it may. Its program is run against a
gateway by `tests/gateway/test_chart_program.py`."""

from __future__ import annotations

import platform

import kubernetes_validate
import pytest

from tests.deploy.chart import CHART, applied, hooks, of_kind

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

CLOSED = {
    "engines": [{"name": "a", "model": "m"}, {"name": "b", "model": "n", "servedModelName": "N"}],
    "clientTls": {"secret": "certificate"},
    "access": {"existingSecrets": "ours"},
    "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "client"}}}]},
    "test": {"chat": False},
}


@pytest.mark.long
def test_it_asks_the_gateway_for_every_model_with_a_tenants_key_and_may_reach_it() -> None:
    (plain,), (closed,) = hooks([{}, CLOSED])
    program = (CHART / "files/test.py").read_text()
    for pod in (plain, closed):
        kubernetes_validate.validate(pod, "1.34", strict=True)
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["spec"]["containers"][0]["command"] == ["python3", "-c", program]
    keys = ["/keys/api-keys"]
    assert plain["spec"]["containers"][0]["args"] == [
        "http://hw-gateway:80", *keys, "--chat", "smollm2-135m-instruct",
    ]  # fmt: skip
    assert closed["spec"]["containers"][0]["args"] == ["https://hw-gateway:80", *keys, "m", "N"]
    assert closed["spec"]["volumes"][0]["secret"]["secretName"] == "ours-keys"

    ((objects,),) = applied([[CLOSED]])
    policy = of_kind(objects, "NetworkPolicy")["hw-gateway"]["spec"]
    callers = [
        peer["podSelector"]["matchLabels"]
        for rule in policy["ingress"]
        for peer in rule.get("from", ())
        if "podSelector" in peer
    ]
    assert any(each.items() <= closed["metadata"]["labels"].items() for each in callers)
