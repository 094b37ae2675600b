"""The two text stages as processes: ready quickly without torch, present on the bus, gone in
order."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.services.output_processor.__main__ import OutputProcessorSettings
from headwater.services.processor.__main__ import ProcessorSettings
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.process import READY_FD
from tests.long_values import long_but

ENGINE = "headwater.services.engine"
STAGES = {
    "headwater.services.processor": Kind.PROCESSOR,
    "headwater.services.output_processor": Kind.OUTPUT_PROCESSOR,
}
# Torch is installed where the tests run; a stage that wants it fails here.
WITHOUT_TORCH = (
    "import sys, runpy; sys.modules['torch'] = None; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], None, '__main__')"
)


@asynccontextmanager
async def running(
    module: str, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    """The process and what it announced."""
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WITHOUT_TORCH, module, *flags),
        env={**os.environ, READY_FD: str(write)},
        pass_fds=(write,),
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(write)
    with os.fdopen(read) as word:
        line = await asyncio.to_thread(word.readline)
    try:
        yield process, json.loads(line)["addresses"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


COMMON = ["stage_tls_cert_file", "stage_tls_key_file", "stage_tls_ca_file", "stage_tls_name"]
COMMON += ["cluster_token", "cluster_token_file"]
COMMON += [
    "host",
    "port",
    "advertise",
    "replica_id",
    "nats_url",
    "redis_url",
    "model_folder",
    "served_model_name",
    "drain_limit",
]
COMMON += ["metrics_port", "otlp_endpoint", "log_level"]
OWN = ["dtype", "kv_format", "block_size", "max_model_len", "chat_template"]
OWN += ["trust_request_chat_template", "generation_config"]
OWN += ["tool_call_parser", "reasoning_parser", "escape_special_tokens", "close_schemas"]
OWN += ["warm_grammars", "threads"]


@pytest.mark.parametrize(
    ("settings", "knobs"),
    [(ProcessorSettings, COMMON + OWN), (OutputProcessorSettings, COMMON)],
    ids=STAGES,
)
def test_a_new_knob_is_a_decision(settings: type, knobs: list[str]) -> None:
    assert [field.name for field in dataclasses.fields(settings)] == knobs


@pytest.mark.parametrize("module", long_but(STAGES, "headwater.services.output_processor"))
async def test_a_stage_is_ready_present_and_gone_in_order(
    module: str, demo_folder: Path, nats_url: str
) -> None:
    kind = STAGES[module]
    replica_id = f"{module}-{uuid.uuid4().hex}"
    flags = [
        f"--model-folder={demo_folder}",
        f"--nats-url={nats_url}",
        f"--replica-id={replica_id}",
    ]
    async with (
        Bus.open(nats_url) as bus,
        Members(bus, [kind]).running() as members,
        asyncio.timeout(120),
    ):
        async with running(module, *flags) as (process, addresses):
            await members.wait_for(lambda all: all.get(kind, replica_id) is not None)
            member = members.get(kind, replica_id)
            assert member is not None
            assert member.address == addresses["grpc"]
            assert member.model is not None
            assert member.model.name == "smollm2-135m-instruct"
            async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
                reply = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest()
                )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            assert "headwater_" in await asyncio.to_thread(
                _get, f"http://{addresses['metrics']}/metrics"
            )
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        await members.wait_for(lambda all: all.get(kind, replica_id) is None)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return str(reply.read().decode())


@pytest.mark.parametrize("module", long_but([*STAGES, ENGINE], "headwater.services.processor"))
async def test_a_stage_that_lacks_its_model_says_so_and_fails(module: str, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, f"--model-folder={tmp_path}", stderr=asyncio.subprocess.PIPE
    )
    _, printed = await process.communicate()
    assert process.returncode == 1
    assert (
        "is not a converted model: model.json is missing"
        in printed.decode().strip().splitlines()[-1]
    )


@pytest.mark.long
async def test_an_output_processor_whose_tokens_spell_no_bytes_says_so_and_fails(
    demo_folder: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((demo_folder / "tokenizer.json").read_text())
    words = {"type": "BPEDecoder", "suffix": "</w>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"decoder": words}))
    (tmp_path / "model.json").write_bytes((demo_folder / "model.json").read_bytes())
    module = "headwater.services.output_processor"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, f"--model-folder={tmp_path}", stderr=asyncio.subprocess.PIPE
    )
    _, printed = await process.communicate()
    assert process.returncode == 1
    lines = printed.decode().strip().splitlines()
    assert lines[-1].startswith(
        "headwater output-processor: the tokenizer's decoder is BPEDecoder; allowed: ByteLevel"
    )
    assert not any("Traceback" in line for line in lines)


@pytest.mark.long
async def test_a_processor_whose_model_has_a_default_that_no_request_may_have_says_so_and_fails(
    demo_folder: Path, tmp_path: Path
) -> None:
    defaults = tmp_path / "generation_config.json"
    defaults.write_text('{"top_k": 50.5}')
    flags = [f"--model-folder={demo_folder}", f"--generation-config={defaults}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headwater.services.processor", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    _, printed = await process.communicate()
    assert process.returncode == 1
    assert (
        "top_k is 50.5; allowed: a number that the field can hold"
        in printed.decode().strip().splitlines()[-1]
    )


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_a_stage_listens_on_ipv6_and_says_which_address_it_cannot_have() -> None:
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with (
        taken,
        pytest.raises(
            OSError, match=re.escape(f"cannot listen on [::1]:{taken.getsockname()[1]}: ")
        ),
    ):
        Listener("::1", taken.getsockname()[1])
    listener = Listener("::1", 0)
    await listener.start()
    async with grpc.aio.insecure_channel(listener.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=60
        )
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await listener.server.stop(None)
