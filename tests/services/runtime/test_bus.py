from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headwater.services.runtime import bus as bus_module
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.settings import SettingError
from headwater.services.runtime.tasks import owned_task
from headwater.services.stack.embedded import start_nats
from tests.simulation.bus_twin import Air, BusTwin
from tests.simulation.cluster.relay import Relay


@contextlib.asynccontextmanager
async def two_buses(kind: str, nats_url: str) -> AsyncIterator[tuple[Bus, Bus]]:
    """On one server, or on one twin of it."""
    if kind == "real":
        async with Bus.open(nats_url) as one, Bus.open(nats_url) as other:
            yield one, other
    else:
        air = Air()
        async with BusTwin.on(air) as one, BusTwin.on(air) as other:
            yield one, other


@pytest.mark.parametrize("kind", ["real", "twin"])
async def test_a_message_reaches_every_subscriber_of_its_pattern(kind: str, nats_url: str) -> None:
    word = uuid.uuid4().hex
    async with two_buses(kind, nats_url) as (one, other), other.subscribe(f"{word}.>") as messages:
        await one.publish(f"{word}.a", b"1")
        await one.publish(f"not{word}.a", b"2")
        await one.publish(f"{word}.b", b"3")
        async with asyncio.timeout(60):
            first, second = await anext(messages), await anext(messages)
    assert (first.subject, first.payload) == (f"{word}.a", b"1")
    assert (second.subject, second.payload) == (f"{word}.b", b"3")


async def test_a_server_that_answers_is_chosen_among_several(nats_url: str) -> None:
    async with Bus.open(f"nats://127.0.0.1:1,{nats_url}", wait_seconds=60) as bus:
        assert bus.connected


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://nats:4222", "http://nats:4222"),
        ("nats://nats:port", "nats://nats:port"),
        ("nats://", "nats://"),
        ("tls://a:4222,", ""),
        ("nats://gateway:half/secret@nats:4222", "nats:4222"),
    ],
)
def test_what_is_no_address_of_a_server_is_refused(url: str, named: str) -> None:
    with pytest.raises(
        SettingError,
        match=f"^--nats-url is '{named}'; allowed: nats://host:port or tls://host:port",
    ):
        Bus(url)


@pytest.mark.parametrize("kind", ["real", "twin"])
async def test_an_exact_subject_receives_its_own_messages_alone_also_those_of_its_own_bus(
    kind: str, nats_url: str
) -> None:
    word = uuid.uuid4().hex
    async with two_buses(kind, nats_url) as (one, _), one.subscribe(word) as messages:
        await one.publish(f"{word}.a", b"1")
        await one.publish(word, b"2")
        async with asyncio.timeout(60):
            assert (await anext(messages)).payload == b"2"


async def test_a_bus_without_a_url_takes_everything_and_delivers_nothing() -> None:
    async with Bus.open(None) as bus, bus.subscribe(">") as messages:
        await bus.publish("a", b"1")
        assert not bus.connected
        done, _ = await asyncio.wait({asyncio.ensure_future(anext(messages))}, timeout=0.05)
        assert not done


async def test_a_bus_opened_before_its_server_delivers_once_the_server_is_up(
    free_dir: Path,
) -> None:
    server = await start_nats(free_dir)
    await server.stop()
    async with Bus.open(server.url, wait_seconds=0.05) as bus, bus.subscribe("a") as messages:
        assert not bus.connected
        await bus.publish("a", b"lost")
        server = await start_nats(free_dir, port=server.port)
        assert await bus.wait_connected(60)
        await bus.publish("a", b"arrives")
        async with asyncio.timeout(60):
            assert (await anext(messages)).payload == b"arrives"
    await server.stop()


async def test_subscriptions_survive_a_restart_of_the_server_and_publishing_never_raises(
    free_dir: Path,
) -> None:
    server = await start_nats(free_dir)
    async with Bus.open(server.url) as bus, bus.subscribe("a") as messages:
        reconnects: list[int] = []
        bus.on_connected(lambda: reconnects.append(1))
        await server.kill()
        for number in range(100):
            await bus.publish("a", b"%d" % number)
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            while bus.connected:  # noqa: ASYNC110 (a loss has no event)
                await asyncio.sleep(0.01)
        server = await start_nats(free_dir, port=server.port)
        assert await bus.wait_connected(60)
        await bus.publish("a", b"after")
        async with asyncio.timeout(60):
            async for message in messages:
                if message.payload == b"after":
                    break
        assert reconnects == [1]
    await server.stop()


async def test_a_listener_that_fails_keeps_no_bus_from_coming_back_twice(free_dir: Path) -> None:
    server = await start_nats(free_dir)
    reconnects: list[int] = []

    def fail() -> None:
        raise RuntimeError("a fault in a listener")

    async with Bus.open(server.url) as bus:
        bus.on_connected(fail)
        bus.on_connected(lambda: reconnects.append(1))
        for _ in range(2):
            await server.kill()
            async with asyncio.timeout(60):
                while bus.connected:  # noqa: ASYNC110 (a loss has no event)
                    await asyncio.sleep(0.01)
            server = await start_nats(free_dir, port=server.port)
            assert await bus.wait_connected(60)
        assert reconnects == [1, 1]
    await server.stop()


async def test_a_bus_comes_back_to_a_server_that_refused_its_password_for_a_while(
    free_dir: Path,
) -> None:
    """With its subscriptions, and with the buckets and queues that its process opened before."""
    config = free_dir / "nats.conf"

    def write_password(word: str) -> None:
        config.write_text(f'authorization {{ users: [ {{user: "stage", password: "{word}"}} ] }}\n')

    write_password("right")
    server = await start_nats(free_dir, jetstream=free_dir / "js", config=config)
    url = server.url.replace("://", "://stage:right@")
    async with Bus.open(url, wait_seconds=60) as bus, bus.subscribe("a") as messages:
        js = bus.jetstream()
        assert js is not None
        bucket = await js.create_key_value(bucket="kept")
        await js.add_stream(name="jobs", subjects=["jobs"])
        queue = await js.pull_subscribe("jobs", durable="runners", stream="jobs")
        write_password("wrong")
        os.kill(server.pid, signal.SIGHUP)
        async with asyncio.timeout(60):
            while bus.connected:  # noqa: ASYNC110 (a loss has no event)
                await asyncio.sleep(0.01)
        # Long enough for a dozen attempts without growing pauses.
        began = time.monotonic()
        await asyncio.sleep(2.5)
        num_attempts = (free_dir / "nats.log").read_text().count("authentication error")
        # A busy machine sleeps for longer; then an attempt comes each three seconds.
        assert num_attempts <= 6 + (time.monotonic() - began - 2.5) / 3
        write_password("right")
        os.kill(server.pid, signal.SIGHUP)
        assert await bus.wait_connected(60)
        await bus.publish("a", b"after")
        async with asyncio.timeout(60):
            assert (await anext(messages)).payload == b"after"
        await bucket.put("key", b"value")
        await js.publish("jobs", b"work")
        assert [job.data for job in await queue.fetch(1, timeout=60)] == [b"work"]
    await server.stop()


async def test_a_server_that_hangs_is_given_up_however_much_was_written_to_it(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "_PING_SECONDS", 0.5)
    server = await start_nats(free_dir)
    async with Bus.open(server.url, wait_seconds=60) as bus, bus.subscribe("a") as messages:
        os.kill(server.pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            # More than the system and the client hold back.
            while bus.connected:
                await bus.publish("b", bytes(500_000))
        os.kill(server.pid, signal.SIGCONT)

        async def call() -> None:
            while True:
                await bus.publish("a", b"after")
                await asyncio.sleep(0.05)

        async with asyncio.timeout(60), owned_task(call()):
            assert (await anext(messages)).payload == b"after"
    await server.stop()


async def test_a_bus_goes_on_though_a_subscriber_did_not_wait_for_the_server_to_know_it(
    nats_url: str,
) -> None:
    """The late answer is nobody's then, and what comes after it is read all the same."""
    word = uuid.uuid4().hex
    async with Relay().running() as relay:
        relay.find = lambda: nats_url.removeprefix("nats://")
        async with (
            Bus.open(f"nats://{relay.address}", wait_seconds=60) as bus,
            bus.subscribe(word) as messages,
        ):
            relay.cut()

            async def subscribes() -> None:
                async with bus.subscribe(f"{word}.more"):
                    pass

            for _ in range(3):
                subscribing = asyncio.create_task(subscribes())
                await asyncio.sleep(0.01)
                subscribing.cancel()
                await asyncio.wait({subscribing}, timeout=60)
                assert subscribing.cancelled()
            relay.mend()
            await bus.publish(word, b"heard")
            async with asyncio.timeout(60):
                assert (await anext(messages)).payload == b"heard"
            assert bus.connected
