from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from headwater.services.runtime import store as store_module
from headwater.services.runtime.settings import SettingError
from headwater.services.runtime.store import READ_SECONDS, Script, Store, StoreUnavailable
from headwater.services.stack.embedded import start_valkey

ECHO = Script("return {KEYS[1], ARGV[1]}")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis calls without a limit of their own wait up to a minute, so that none times out on a
    slow machine."""
    for name in ("_PATIENCE_SECONDS", "_CONNECT_SECONDS"):
        monkeypatch.setattr(store_module, name, 60.0)


async def test_a_script_runs_whether_or_not_the_server_knows_it(redis_url: str) -> None:
    async with Store.open(redis_url) as store:
        await store.command("SCRIPT", "FLUSH")
        for _ in range(2):
            assert await store.run(ECHO, [b"k\xff"], [b"\x00v"]) == [b"k\xff", b"\x00v"]


async def test_a_faulty_script_is_our_fault_and_no_outage(redis_url: str) -> None:
    async with Store.open(redis_url) as store:
        with pytest.raises(ResponseError, match="no such thing"):
            await store.run(Script("return redis.error_reply('no such thing')"), ["k"])
        assert not store.broken


async def test_more_calls_at_once_than_there_are_connections_are_answered_all(
    redis_url: str,
) -> None:
    async with Store.open(redis_url) as store:
        answers = await asyncio.gather(*(store.run(ECHO, ["k"], [number]) for number in range(300)))
    assert answers == [[b"k", b"%d" % number] for number in range(300)]


async def test_a_url_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(SettingError, match=r"^--redis-url is 'http://host'; allowed: redis://"):
        async with Store.open("http://me:secret@host"):
            pass


async def test_without_a_url_the_store_is_unavailable(redis_url: str) -> None:
    async with Store.open(None) as store:
        with pytest.raises(StoreUnavailable):
            await store.command("GET", "x")
        assert store.broken


async def test_a_slow_store_costs_a_request_three_milliseconds_and_the_next_ones_nothing(
    redis_url: str,
) -> None:
    now = 0.0
    async with Store.open(redis_url, clock=lambda: now) as store:
        await store.command("PING")
        with pytest.raises(StoreUnavailable, match=r"no answer within 3\.0 ms"):
            await store.command("BLPOP", "never", "60", seconds=READ_SECONDS)
        for _ in range(100):
            with pytest.raises(StoreUnavailable, match="left alone"):
                await store.command("GET", "x", seconds=READ_SECONDS)
        # Whoever has time is served all along, and the hurried come back after a while.
        assert await store.command("GET", "x") is None
        assert store.broken
        now = 0.6
        assert not store.broken
        assert await store.command("GET", "x", seconds=30.0) is None


async def test_a_store_that_was_killed_serves_again_after_its_restart(free_dir: Path) -> None:
    server = await start_valkey(free_dir)
    async with Store.open(server.url) as store:
        await store.command("SET", "x", "1")
        await server.kill()
        for _ in range(5):
            with pytest.raises(StoreUnavailable):
                await store.command("GET", "x")
        server = await start_valkey(free_dir, port=server.port)
        assert await store.command("GET", "x") is None
        assert await store.run(ECHO, ["k"], ["v"]) == [b"k", b"v"]
    await server.stop()


async def test_one_call_finds_that_the_connections_died_with_the_server_and_no_other_fails(
    free_dir: Path,
) -> None:
    server = await start_valkey(free_dir)
    try:
        async with Store.open(server.url) as store:
            await asyncio.gather(*(store.command("BLPOP", f"nothing{i}", 0.05) for i in range(8)))
            await server.kill()
            with pytest.raises(StoreUnavailable):
                await store.command("PING")
            server = await start_valkey(free_dir, port=server.port)
            assert await asyncio.gather(*(store.command("PING") for _ in range(8))) == [True] * 8
    finally:
        await server.stop()


async def test_a_server_that_cannot_serve_is_an_outage_too(free_dir: Path) -> None:
    server = await start_valkey(free_dir)
    async with Store.open(server.url) as store:
        await store.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable):
            await store.command("SET", "x", "1")
        body = "redis.call('SET', KEYS[1], 1) return 1"
        with pytest.raises(StoreUnavailable):
            await store.run(Script(body, past_memory_bound=False), ["x"])
        # What the cluster needs is written all the same.
        assert await store.run(Script(body), ["x"]) == 1
        # Nor one that has lost the replicas without which it is not to write.
        await store.command("CONFIG", "SET", "maxmemory", "0", "min-replicas-to-write", "1")
        with pytest.raises(StoreUnavailable):
            await store.command("SET", "x", "1")
        with pytest.raises(StoreUnavailable):
            await store.run(Script(body), ["x"])
    await server.stop()


async def test_a_call_that_is_cancelled_ends_whenever_that_comes(redis_url: str) -> None:
    """Also in the moment in which its command is written or its answer read."""

    async def asks() -> None:
        while True:
            await store.command("PING")

    async with Store.open(redis_url) as store:
        for num_turns in range(60):
            asking = asyncio.create_task(asks())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking}, timeout=60)
            assert asking.cancelled()
