"""What administrators read of a gateway: the last hours, stores, settings, logs."""

from __future__ import annotations

import contextlib

import pytest

from tests.browser.chromium import Chromium
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway

PATHS = ("/console/history", "/admin/stores", "/admin/configuration", "/admin/logs")


def test_a_gateway_alone_shows_its_settings_and_says_where_logs_are(gateway: Gateway) -> None:
    reported = {
        each["name"]: each for each in gateway.client.get("/admin/configuration").json()["data"]
    }
    assert reported["port"] | {"process": ""} == {
        "name": "port",
        "value": "0",
        "source": "flag",
        "process": "",
    }
    stores = gateway.client.get("/admin/stores").json()
    assert stores["data"] == []
    assert "kubelet_volume_stats_available_bytes" in stores["note"]
    history = gateway.client.get("/console/history").json()
    assert history["seconds"] == 30
    # Its first sample comes after so many seconds.
    assert all(each["num_waiting"] >= 0 for each in history["data"])
    refused = gateway.client.get("/admin/logs")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_supervisor")
    assert "kubectl logs" in refused.json()["error"]["message"]


def test_stores_that_a_gateway_cannot_reach_are_shown_with_the_problem(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    gone = ("--nats-url=nats://127.0.0.1:9", "--redis-url=redis://127.0.0.1:9")
    with start_gateway(behind, *gone) as gateway:
        nats, redis = gateway.client.get("/admin/stores").json()["data"]
    assert (nats["kind"], nats["problem"]) == ("NATS", "it cannot be reached")
    assert (redis["kind"], "refused" in redis["problem"].lower()) == ("Redis", True)


@pytest.mark.long
def test_the_console_without_a_supervisor_says_where_disks_and_logs_are(
    chromium: Chromium, gateway: Gateway
) -> None:
    with contextlib.closing(chromium.new_page()) as page:
        page.open(f"{gateway.rest}/#system")
        page.wait("document.querySelector('.notice').innerText.includes('kubelet_volume_stats')")
        page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.wait("document.body.innerText.includes('kubectl logs')")
        assert page.complaints == []


@pytest.mark.parametrize("path", PATHS)
def test_pages_of_other_origins_read_none_of_it(gateway: Gateway, path: str) -> None:
    headers = {"origin": gateway.rest, "sec-fetch-site": "same-site"}
    reply = gateway.client.get(path, headers=headers)
    assert reply.json()["error"]["code"] == "permission_denied"
