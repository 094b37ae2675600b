"""What `headwater access` draws for a deployment in containers, with the servers and the shell that
read it there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headwater.services.runtime.bus import Bus
from headwater.services.runtime.cluster_key import read_cluster_key
from headwater.services.stack.embedded import EmbeddedServer, start_nats, start_valkey
from headwater.services.stack.roles import VALKEY_RIGHTS, Role

COMPOSE = (Path(__file__).parents[3] / "compose.yaml").read_text()


def access(folder: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "headwater.services.cli", "access", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def read_by_a_stage(folder: Path, role: Role) -> dict[str, str]:
    """The variables of a container's stage: its entrypoint as compose.yaml has it, with `env` for
    `headwater`."""
    [script] = re.findall(r"&with-access \[\"sh\", \"-c\", '(.*)'\]", COMPOSE)
    script = (
        script.replace("$$", "$")
        .replace("/access/", f"{folder / role.value}/")
        .replace("exec headwater", "exec")
    )
    done = subprocess.run(
        ["sh", "-c", script, "env"], capture_output=True, text=True, check=True, timeout=60, env={}
    )
    return dict(each.split("=", 1) for each in done.stdout.splitlines())


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def test_the_servers_admit_those_with_the_files_alone(
    free_dir: Path, kept: dict[str, Any]
) -> None:
    folder = free_dir / "access"
    nats_: EmbeddedServer | None = None
    valkey: EmbeddedServer | None = None
    access(folder)
    try:
        nats_ = await start_nats(
            free_dir, jetstream=free_dir / "js", config=folder / "nats/nats.conf", **kept
        )
        valkey = await start_valkey(free_dir, acl=folder / "redis/users.acl", **kept)
        for role in Role:
            reported = read_by_a_stage(folder, role)
            assert read_cluster_key(reported["HEADWATER_CLUSTER_TOKEN"], "") is not None
            assert reported["HEADWATER_NATS_URL"].endswith("@nats:4222")
            here = reported["HEADWATER_NATS_URL"].replace(
                "nats:4222", nats_.url.removeprefix("nats://")
            )
            async with Bus.open(here, wait_seconds=60) as bus:
                assert bus.connected
            store_url = reported["HEADWATER_REDIS_URL"].replace(
                "redis:6379", valkey.url.removeprefix("redis://")
            )
            assert bool(store_url) is (role in VALKEY_RIGHTS)
            if store_url:
                async with Redis.from_url(store_url) as client:
                    assert await client.ping()
    finally:
        for server in (nats_, valkey):
            if server is not None:
                await server.stop()


@pytest.mark.long
def test_what_is_there_is_kept_and_passwords_are_renewed_without_the_token(tmp_path: Path) -> None:
    access(tmp_path)
    first = contents(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {
        0o600
    }
    access(tmp_path)
    assert contents(tmp_path) == first
    access(tmp_path, "--renew")
    renewed = contents(tmp_path)
    assert {name for name in first if renewed[name] == first[name]} == {
        "cluster.token",
        "gateway/master.key",
    }
    (tmp_path / "cluster.token").write_text(f"{'n' * 64}\n{first['cluster.token']}")
    access(tmp_path)
    reported = read_by_a_stage(tmp_path, Role.ENGINE)
    assert reported["HEADWATER_CLUSTER_TOKEN"].split() == ["n" * 64, first["cluster.token"].strip()]
