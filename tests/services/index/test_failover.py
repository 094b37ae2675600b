"""The index over a primary that dies, whose place a replica takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from headwater.services.index.writer import IndexWriter
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import EmbeddedServer, start_valkey, valkey_binary
from tests.free_ports import free_port
from tests.services.index.test_writer import FIRST, blocks, stored, wait_for_column

NAME = "primary"
PASSWORD = "of-the-servers"
PASSWORD_OF_SENTINELS = "of-the-sentinels"
SECONDS = 60


@asynccontextmanager
async def sentinel(
    folder: Path, primary: EmbeddedServer, kept: dict[str, Any]
) -> AsyncIterator[int]:
    """One Sentinel that decides alone; yields its port once it knows the replica."""
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass {PASSWORD_OF_SENTINELS}\n"
        f"sentinel monitor {NAME} 127.0.0.1 {primary.port} 1\n"
        f"sentinel auth-pass {NAME} {PASSWORD}\n"
        f"sentinel down-after-milliseconds {NAME} 1000\n"
        f"sentinel failover-timeout {NAME} 5000\n"
    )
    command = [*kept["launcher"], valkey_binary() or "", str(config), "--sentinel"]
    with (folder / "sentinel.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, pass_fds=kept["pass_fds"]
        )
    try:
        async with asyncio.timeout(SECONDS):
            while not await knows_a_replica(port):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def knows_a_replica(port: int) -> bool:
    with contextlib.suppress(RedisError, OSError):
        async with Redis(port=port, password=PASSWORD_OF_SENTINELS) as client:
            replicas = await client.sentinel_slaves(NAME)
            return bool(replicas) and replicas[0]["master-link-status"] == "ok"
    return False


@pytest.mark.long
async def test_the_index_goes_on_at_the_replica_that_follows_a_dead_primary(
    free_dir: Path, served_model: ServedModel, kept: dict[str, Any]
) -> None:
    servers = [await start_valkey(free_dir / name) for name in ("one", "two")]
    primary, replica = servers
    for server in servers:
        async with Redis.from_url(server.url) as client:
            await client.config_set("masterauth", PASSWORD)
            await client.config_set("requirepass", PASSWORD)
    async with Redis.from_url(replica.url, password=PASSWORD) as client:
        await client.replicaof("127.0.0.1", primary.port)
    async with sentinel(free_dir, primary, kept) as port:
        # The first of the two Sentinels is not there.
        url = (
            f"redis+sentinel://:{PASSWORD}@127.0.0.1:{free_port()},127.0.0.1:{port}/{NAME}"
            f"?sentinel_password={PASSWORD_OF_SENTINELS}"
        )
        async with (
            Store.open(url) as store,
            IndexWriter(store, served_model, FIRST).running() as writer,
        ):
            writer.apply(stored(*range(100)))
            await wait_for_column(store, served_model, set(blocks(*range(100))), seconds=SECONDS)
            await primary.kill()
            writer.apply(stored(*range(100, 200)))
            await wait_for_column(store, served_model, set(blocks(*range(200))), seconds=SECONDS)
            async with Redis.from_url(replica.url, password=PASSWORD) as client:
                assert (await client.info("replication"))["role"] == "master"
    await replica.stop()
