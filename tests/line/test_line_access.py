"""A line as `headwater up` starts it, attacked by another user of the machine, who can reach its
ports and run `ps`."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import nats.errors
import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from headwater.gateway.jobs.batches.files import Files
from headwater.gateway.jobs.durable import Durable
from headwater.gateway.tenancy.directory import new_key
from headwater.gateway.tenancy.records import TenantRecord
from headwater.gateway.tenancy.tenant_store import TenantStore
from headwater.proto import engine_pb2, engine_pb2_grpc
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.usage_log import STREAM, UsageLog, UsageRecord
from headwater.services.stack.embedded import start_nats
from tests.forked_cluster import ForkedCluster
from tests.line.conftest import Line


def env_of(line: Line, role: str) -> dict[str, str]:
    text = (line.state_dir / "access" / role / "stage.env").read_text()
    return {
        name: value.strip("'")
        for name, _, value in (each.partition("=") for each in text.splitlines())
    }


def test_a_client_without_a_password_gets_into_neither_server(simulated_line: Line) -> None:
    record = simulated_line.record
    for printed in ({}, {"user": "gateway", "pass": "guess"}, {"user": "nobody", "pass": ""}):
        assert "Authorization Violation" in answers_of_nats(record.nats_url, printed)
    at = urlsplit(record.redis_url)
    with (
        socket.create_connection((at.hostname, at.port), timeout=60) as link,
        link.makefile("rwb") as lines,
    ):
        for printed, answer in (
            (b"KEYS *", b"-NOAUTH"),
            (b"AUTH gateway guess", b"-WRONGPASS"),
            (b"AUTH x", b"-WRONGPASS"),
        ):
            lines.write(printed + b"\r\n")
            lines.flush()
            assert lines.readline().startswith(answer)


def answers_of_nats(url: str, printed: dict[str, str], *commands: str) -> str:
    """What the server says to a client that connects so, up to its answer to a ping."""
    at = urlsplit(url)
    answers = list[str]()
    with (
        socket.create_connection((at.hostname, at.port), timeout=60) as link,
        link.makefile("rwb") as lines,
    ):
        assert lines.readline().startswith(b"INFO ")
        connect = json.dumps({"verbose": False, "pedantic": False, **printed})
        lines.write(
            "".join(f"{line}\r\n" for line in (f"CONNECT {connect}", *commands, "PING")).encode()
        )
        lines.flush()
        while not answers or answers[-1] not in ("", "PONG"):
            answers.append(lines.readline().decode().strip())
    return "\n".join(answers)


def test_an_engine_s_password_opens_what_engines_need_and_no_more(simulated_line: Line) -> None:
    env = env_of(simulated_line, "engine")
    at = urlsplit(env["HEADWATER_NATS_URL"])
    ours = {"user": str(at.username), "pass": str(at.password)}
    for subject in (
        "member.gateway.x",
        "ctl.models.x",
        "catalogue.x",
        "$KV.headwater_tenants.x",
        "$JS.API.INFO",
    ):
        answer = answers_of_nats(env["HEADWATER_NATS_URL"], ours, f"PUB {subject} 0", "")
        assert f'Permissions Violation for Publish to "{subject}"' in answer
    for subject in ("ctl.kv.>", "batch.>", "demand.>", "_INBOX.>"):
        answer = answers_of_nats(env["HEADWATER_NATS_URL"], ours, f"SUB {subject} 1")
        assert f'Permissions Violation for Subscription to "{subject}"' in answer
    assert (
        answers_of_nats(env["HEADWATER_NATS_URL"], ours, "PUB load.x 0", "", "SUB ctl.hello 1")
        == "PONG"
    )
    with Redis.from_url(env["HEADWATER_REDIS_URL"]) as store:
        store.set("own:{x}", b"1")
        store.delete("own:{x}")
        for words in (
            ("GET", "limits:{tenant:a}"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("KEYS", "*"),
        ):
            with pytest.raises(NoPermissionError):
                store.execute_command(*words)


def test_a_stranger_s_drain_is_refused_and_the_engine_serves_on(simulated_line: Line) -> None:
    [address, *_] = [
        each.addresses["grpc"] for each in simulated_line.record.stages if each.name == "engine-0"
    ]
    with grpc.insecure_channel(address) as channel:
        stub: Any = engine_pb2_grpc.EngineStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Drain(engine_pb2.DrainRequest(limit_ms=1), timeout=60)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert {each["draining"] for each in simulated_line.loads_of(2).values()} == {False}


@pytest.mark.long
def test_a_stage_that_is_started_by_hand_joins_with_its_role_s_file(simulated_line: Line) -> None:
    flags = (
        "--executor=simulated",
        "--served-model-name=another",
        "--replica-id=by-hand",
        "--metrics-port=-1",
    )
    known = simulated_line.loads()
    assert "by-hand" not in known
    process = subprocess.Popen(
        [sys.executable, "-m", "headwater.services.cli", "serve", "engine", *flags],
        env={**os.environ, **env_of(simulated_line, "engine")},
        stderr=subprocess.DEVNULL,
    )
    try:
        simulated_line.wait_for(
            lambda: "by-hand" in simulated_line.loads(), 60, "the engine does not join"
        )
    finally:
        process.terminate()
        process.wait(60)
    simulated_line.wait_for(
        lambda: "by-hand" not in simulated_line.loads(), 60, "the engine does not leave"
    )


async def kept_by_an_earlier_version(state_dir: Path) -> str:
    """A state folder without a token, whose NATS knows a tenant that has a file; the tenant's
    key."""
    key, secret = new_key()
    server = await start_nats(state_dir / "logs", jetstream=state_dir / "nats")
    try:
        async with Bus.open(server.url, wait_seconds=60.0) as bus:
            await TenantStore(bus).add(TenantRecord(id="ada", keys=(key,)))
            await Files(Durable(bus)).add("ada", "old.jsonl", "batch", io.BytesIO(b"{}"), 2)
    finally:
        await server.stop()
    return secret


def is_known(line: Line, headers: dict[str, str]) -> bool:
    return line.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.long
def test_tenants_of_an_earlier_version_keep_their_keys_and_files(tmp_path: Path) -> None:
    ada = {"authorization": f"Bearer {asyncio.run(kept_by_an_earlier_version(tmp_path))}"}
    for _ in range(2):
        env = {"HEADWATER_ADMIN_KEY": "admin-key-of-the-house"}
        flags = ("--executor=simulated", "--min-replicas=0")
        with Line(tmp_path, *flags, env=env, start=ForkedCluster) as line:
            line.wait_for(partial(is_known, line, ada), 30, "the key is not known")
            files = line.client.get("/v1/files", headers=ada).json()["data"]
            assert [each["filename"] for each in files] == ["old.jsonl"]
            assert not (tmp_path / "unsigned-tenants").exists()
            line.stop()


async def test_an_output_processor_may_write_what_a_dead_gateway_left(simulated_line: Line) -> None:
    loop = asyncio.get_running_loop()
    async with (
        Bus.open(
            env_of(simulated_line, "output-processor")["HEADWATER_NATS_URL"], wait_seconds=60.0
        ) as bus,
        UsageLog(bus).running() as log,
        asyncio.timeout(60),
    ):
        # The second time there is one, which is looked at.
        for outcome in ("left", "done"):
            stored: asyncio.Future[int] = loop.create_future()
            record = UsageRecord(
                request_id="left-1", tenant="t", model="m", at=time.time(), outcome=outcome
            )
            log.add(record, stored.set_result)
            assert await stored > 0
        # It takes nothing away: budgets are counted from these records.
        js = bus.jetstream()
        assert js is not None
        with pytest.raises(nats.errors.TimeoutError):
            await js.purge_stream(STREAM)
