"""Scrapes of a stage: they read its state where it changes, and what fails is the scrape alone."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headwater.services.runtime.metrics_server import metrics_served


class Observed(Collector):
    """A gauge, and the threads in which it was read."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.fault: Exception | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.threads.add(threading.get_ident())
        if self.fault is not None:
            raise self.fault
        yield GaugeMetricFamily("headwater_observed", "A number", value=7)


@pytest.fixture
def observed() -> Iterator[Observed]:
    with registered(Observed()) as collector:
        collector.threads.clear()
        yield collector


@contextmanager
def registered(collector: Observed) -> Iterator[Observed]:
    REGISTRY.register(collector)
    try:
        yield collector
    finally:
        REGISTRY.unregister(collector)


async def scraped(address: str, query: str = "") -> str:
    def scrape() -> bytes:
        with urlopen(f"http://{address}/metrics{query}") as answer:
            return bytes(answer.read())

    return (await asyncio.to_thread(scrape)).decode()


async def test_what_the_event_loop_changes_is_read_on_the_event_loop(observed: Observed) -> None:
    with metrics_served("127.0.0.1", 0) as addresses:
        assert "headwater_observed 7.0" in await scraped(addresses["metrics"])
        some = await scraped(addresses["metrics"], "?name[]=headwater_observed")
    assert "headwater_observed 7.0" in some
    assert "python_info" not in some
    assert observed.threads == {threading.get_ident()}


async def test_a_scrape_that_fails_is_answered_and_the_next_one_too(
    observed: Observed, capfd: pytest.CaptureFixture[str]
) -> None:
    with metrics_served("127.0.0.1", 0) as addresses:
        observed.fault = ValueError("no number")
        with pytest.raises(HTTPError, match="500"):
            await scraped(addresses["metrics"])
        observed.fault = None
        assert "headwater_observed 7.0" in await scraped(addresses["metrics"])
    assert "no number" in capfd.readouterr().err


async def test_the_end_waits_for_no_thread() -> None:
    """A server's own thread would look twice a second whether it is to end: the end of an engine
    took that much longer."""
    before = threading.active_count()
    with metrics_served("127.0.0.1", 0):
        assert threading.active_count() == before


async def test_a_connection_that_is_gone_when_it_is_accepted_does_not_stop_the_event_loop() -> None:
    with metrics_served("127.0.0.1", 0) as addresses:
        host, _, port = addresses["metrics"].rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert "python_info" in await scraped(addresses["metrics"])


async def test_without_a_port_nothing_is_served() -> None:
    with metrics_served("127.0.0.1", -1) as addresses:
        assert addresses == {}
