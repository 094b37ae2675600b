from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from headwater.services.bus import Bus
from headwater.services.embedded import start_nats


async def test_a_message_reaches_every_subscriber_of_its_pattern(nats_url: str) -> None:
    word = uuid.uuid4().hex
    async with Bus.open(nats_url) as one, Bus.open(nats_url) as other, other.subscribe(f"{word}.>") as messages:
        await one.publish(f"{word}.a", b"1")
        await one.publish(f"not{word}.a", b"2")
        await one.publish(f"{word}.b", b"3")
        async with asyncio.timeout(5):
            first, second = await anext(messages), await anext(messages)
    assert (first.subject, first.payload) == (f"{word}.a", b"1")
    assert (second.subject, second.payload) == (f"{word}.b", b"3")


async def test_a_bus_without_a_url_takes_everything_and_delivers_nothing() -> None:
    async with Bus.open(None) as bus, bus.subscribe(">") as messages:
        await bus.publish("a", b"1")
        assert not bus.connected
        done, _ = await asyncio.wait({asyncio.ensure_future(anext(messages))}, timeout=0.05)
        assert not done


async def test_a_bus_opened_before_its_server_delivers_once_the_server_is_up(free_dir: Path) -> None:
    server = await start_nats(free_dir)
    await server.stop()
    async with Bus.open(server.url, wait_seconds=0.05) as bus, bus.subscribe("a") as messages:
        assert not bus.connected
        await bus.publish("a", b"lost")
        server = await start_nats(free_dir, port=server.port)
        assert await bus.wait_connected(5)
        await bus.publish("a", b"arrives")
        async with asyncio.timeout(5):
            assert (await anext(messages)).payload == b"arrives"
    await server.stop()


async def test_subscriptions_survive_a_restart_of_the_server_and_publishing_never_raises(free_dir: Path) -> None:
    server = await start_nats(free_dir)
    async with Bus.open(server.url) as bus, bus.subscribe("a") as messages:
        reconnects: list[int] = []
        bus.on_connected(lambda: reconnects.append(1))
        await server.kill()
        for number in range(100):
            await bus.publish("a", b"%d" % number)
            await asyncio.sleep(0.001)
        assert not bus.connected
        server = await start_nats(free_dir, port=server.port)
        assert await bus.wait_connected(5)
        await bus.publish("a", b"after")
        async with asyncio.timeout(5):
            async for message in messages:
                if message.payload == b"after":
                    break
        assert reconnects == [1]
    await server.stop()
