"""What each of two gateways shows that neither knows alone: hottest prefixes, trust, the lag of the
index."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway, chat_body, engine_stage, started


@pytest.fixture(scope="module")
def pair(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str
) -> Iterator[tuple[Gateway, Gateway]]:
    """Two gateways before one engine, which tells both what it caches."""
    engine = engine_stage(f"--nats-url={nats_url}", "--replica-id=shared")
    flags = (f"--nats-url={nats_url}", "--master-key=key-of-both-of-the-two-gateways")
    with started(engine), contextlib.ExitStack() as stack:
        both = Behind(behind.processor, behind.output_processor, (engine.address,))
        first, second = (stack.enter_context(start_gateway(both, *flags)) for _ in range(2))
        for each in (first, second):
            each.wait_until(lambda each=each: len(snapshot(each)["event_lags"]) == 2)  # type: ignore[misc]
        yield first, second


def snapshot(gateway: Gateway) -> dict[str, Any]:
    reported: dict[str, Any] = gateway.client.get("/console/live?once=1").json()
    return reported


def ask(gateway: Gateway, text: str) -> None:
    reply = gateway.client.post("/v1/chat/completions", json=chat_body(text, max_tokens=2))
    assert reply.status_code == 200, reply.text


def hottest(gateway: Gateway) -> list[tuple[int, list[str]]]:
    """Requests of the hottest prefixes, and who holds these."""
    nodes = [node for tree in snapshot(gateway)["prefixes"] for node in tree["nodes"]]
    return [(node["num_requests"], node["holders"]) for node in nodes]


def test_a_prefix_that_one_request_of_each_shares_is_hot_and_its_holder_is_named(
    pair: tuple[Gateway, Gateway],
) -> None:
    for gateway in pair:
        ask(gateway, "The river begins in the mountains and goes to the sea. " * 6)
    for gateway in pair:
        gateway.wait_until(lambda gateway=gateway: hottest(gateway) == [(2, ["shared"])])  # type: ignore[misc]


def test_both_gateways_show_trust_and_index_lag_of_each_engine(
    pair: tuple[Gateway, Gateway],
) -> None:
    names = {snapshot(gateway)["gateway"] for gateway in pair}
    for gateway in pair:
        # A snapshot omits the other gateway while that one is late.
        reported = gateway.first(
            lambda gateway=gateway: snapshot(gateway),
            lambda reported: reported["event_lags"].keys() == names,
        )  # type: ignore[misc]
        (row,) = (each for each in reported["replicas"] if each["id"] == "shared")
        assert row["gateways"].keys() == names
        assert all(each["is_synced"] and each["trust"] == 1.0 for each in row["gateways"].values())
        assert reported["event_lag"] == max(reported["event_lags"].values())
    # The engine tells its events to both; the lag is by how much some of them come later than
    # others.
    first = pair[0]
    numbers = itertools.count()

    def both_lag() -> bool:
        ask(first, f"{next(numbers)} roads lead over the bridge. " * 6)
        return all(lag > 0 for lag in snapshot(first)["event_lags"].values())

    first.wait_until(both_lag)
