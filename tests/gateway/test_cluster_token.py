"""Stages that share a token, attacked by a process that does not have it: every inner call over
real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.proto import (
    engine_pb2,
    engine_pb2_grpc,
    output_processor_pb2,
    output_processor_pb2_grpc,
    processor_pb2_grpc,
)
from headwater.proto import processor_pb2 as pp
from headwater.services.runtime import call_proof, cluster_key, freshness
from headwater.services.runtime.call_proof import Impostor, Proof
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.cluster_key import ClusterKey, read_cluster_key
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.settings import SettingError
from tests.gateway.processes import (
    Behind,
    Gateway,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)

TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="module")
def token_flag(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("secrets") / "cluster.token"
    path.write_text(TOKEN)
    return f"--cluster-token-file={path}"


@pytest.fixture(scope="module")
def guarded(text_folder: Path, token_flag: str) -> Iterator[Behind]:
    processor = processor_stage(text_folder, token_flag)
    output = output_processor_stage(text_folder, token_flag)
    engine = engine_stage(token_flag)
    with started(processor, output, engine):
        yield Behind(processor.address, output.address, (engine.address,))


def test_a_line_of_stages_that_share_a_token_answers(guarded: Behind, token_flag: str) -> None:
    stage = gateway_stage(*guarded.flags(), token_flag)
    with started(stage), Gateway(stage) as gateway:
        gateway.wait_until(gateway.is_ready)
        assert gateway.chat()["usage"]["completion_tokens"] == 8
        reply = gateway.client.post(
            "/tokenize", json={"model": "smollm2-135m-instruct", "prompt": "a river"}
        )
        assert reply.status_code == 200, reply.text


def test_a_gateway_without_the_token_gets_nothing(guarded: Behind) -> None:
    stage = gateway_stage(*guarded.flags())
    with started(stage), Gateway(stage) as gateway:
        reply = gateway.client.post(
            "/v1/completions", json={"model": "smollm2-135m-instruct", "prompt": "a"}
        )
        assert reply.status_code == 503
        assert not gateway.is_ready()


CALLS: dict[str, Callable[[Behind], tuple[str, Callable[[grpc.Channel], Any]]]] = {
    "engine Drain": lambda b: (
        b.replicas[0],
        lambda c: engine_pb2_grpc.EngineStub(c).Drain(engine_pb2.DrainRequest(limit_ms=1)),
    ),
    "engine Info": lambda b: (
        b.replicas[0],
        lambda c: engine_pb2_grpc.EngineStub(c).Info(engine_pb2.InfoRequest()),
    ),
    "engine Session": lambda b: (
        b.replicas[0],
        lambda c: next(engine_pb2_grpc.EngineStub(c).Session(iter([engine_pb2.ClientFrame()]))),
    ),
    "engine KvEvents": lambda b: (
        b.replicas[0],
        lambda c: next(engine_pb2_grpc.EngineStub(c).KvEvents(engine_pb2.KvEventsRequest())),
    ),
    "engine KvSnapshot": lambda b: (
        b.replicas[0],
        lambda c: next(engine_pb2_grpc.EngineStub(c).KvSnapshot(engine_pb2.KvSnapshotRequest())),
    ),
    "processor ListModels": lambda b: (
        b.processor,
        lambda c: processor_pb2_grpc.ProcessorStub(c).ListModels(pp.ProcessorModelsRequest()),
    ),
    "processor Tokenize": lambda b: (
        b.processor,
        lambda c: processor_pb2_grpc.ProcessorStub(c).Tokenize(pp.ProcessorTokenizeRequest()),
    ),
    "processor PrepareSession": lambda b: (
        b.processor,
        lambda c: next(
            processor_pb2_grpc.ProcessorStub(c).PrepareSession(iter([pp.PrepareFrame()]))
        ),
    ),
    "output processor Session": lambda b: (
        b.output_processor,
        lambda c: next(
            output_processor_pb2_grpc.OutputProcessorStub(c).Session(
                iter([output_processor_pb2.GatewayFrame()])
            )
        ),
    ),
    "output processor FindStream": lambda b: (
        b.output_processor,
        lambda c: next(
            output_processor_pb2_grpc.OutputProcessorStub(c).FindStream(
                output_processor_pb2.FindStreamRequest()
            )
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_stranger_s_call_is_refused_and_health_stays_open(name: str, guarded: Behind) -> None:
    address, call = CALLS[name](guarded)
    with grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            call(channel)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=60
        )
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


class Models(processor_pb2_grpc.ProcessorServicer):
    """What a stage serves; counts who got through."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def ListModels(self, request: Any, context: Any) -> pp.ProcessorModelsReply:
        self.num_calls += 1
        return pp.ProcessorModelsReply()

    async def PrepareSession(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for frame in request_iterator:
            yield frame


@contextlib.asynccontextmanager
async def models_served(key: ClusterKey | None) -> AsyncIterator[tuple[str, Models]]:
    with cluster_key.using(key):
        listener = Listener("127.0.0.1", 0)
        servicer = Models()
        processor_pb2_grpc.add_ProcessorServicer_to_server(servicer, listener.server)
        await listener.start()
    try:
        yield listener.address, servicer
    finally:
        await listener.server.stop(None)


LIST_MODELS = "/headwater.v1.Processor/ListModels"


async def refusal(address: str, *metadata: tuple[str, str]) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = processor_pb2_grpc.ProcessorStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListModels(pp.ProcessorModelsRequest(), metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return str(refused.value.details())


async def test_a_proof_is_good_once_for_one_method_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = ClusterKey([TOKEN])
    async with models_served(key) as (address, servicer):
        ours = Proof.new(LIST_MODELS).metadata(key)
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = processor_pb2_grpc.ProcessorStub(channel)
            await stub.ListModels(pp.ProcessorModelsRequest(), metadata=(ours,))
        assert "replayed" in await refusal(address, ours)
        assert "forged" in await refusal(
            address, Proof.new("/headwater.v1.Engine/Drain").metadata(key)
        )
        assert "forged" in await refusal(
            address, Proof.new(LIST_MODELS).metadata(ClusterKey(["x" * 32]))
        )
        late = Proof.new(LIST_MODELS).metadata(key)
        now = freshness.now_ms()
        monkeypatch.setattr(freshness, "now_ms", lambda: now + 61_000)
        assert "stale" in await refusal(address, late)
        for garbage in ("", "1", "..", "1.zz.zz", "9" * 40 + ".00.00", "-1.00.00"):
            await refusal(address, (call_proof._PROOF, garbage))
        assert servicer.num_calls == 1


async def test_a_message_without_a_proof_is_not_even_parsed() -> None:
    parsed: list[bytes] = []
    method = grpc.unary_unary_rpc_method_handler(None, request_deserializer=parsed.append)
    with cluster_key.using(ClusterKey([TOKEN])):
        listener = Listener("127.0.0.1", 0)
    listener.server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", {"Say": method}),)
    )
    await listener.start()
    try:
        async with grpc.aio.insecure_channel(listener.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/test.Echo/Say")(b"x" * (1 << 20), timeout=60)
    finally:
        await listener.server.stop(None)
    assert (refused.value.code(), parsed) == (grpc.StatusCode.UNAUTHENTICATED, [])


async def test_a_process_at_a_stage_s_address_without_the_token_is_detected() -> None:
    async with models_served(None) as (address, _):
        with cluster_key.using(ClusterKey([TOKEN])):
            channel = open_channel(address)
        async with channel, asyncio.timeout(60):
            stub: Any = processor_pb2_grpc.ProcessorStub(channel)
            with pytest.raises(Impostor):
                await channel.proven(stub.PrepareSession())


async def test_a_token_is_rotated_while_stages_run() -> None:
    old = "o" * 32
    new = "n" * 32
    both = ClusterKey([old, new])
    async with models_served(both) as (address, _), asyncio.timeout(60):
        for key in (ClusterKey([old, new]), ClusterKey([new, old])):
            with cluster_key.using(key):
                channel = open_channel(address)
            async with channel:
                stub: Any = processor_pb2_grpc.ProcessorStub(channel)
                await channel.proven(call := stub.ListModels(pp.ProcessorModelsRequest()))
                await call


def test_a_token_that_is_too_short_is_refused_without_being_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as refused:
        read_cluster_key("hunter2", "")
    assert "hunter2" not in str(refused.value)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(SettingError, match="--cluster-token-file"):
        read_cluster_key("", str(tmp_path / "token"))
    assert read_cluster_key("", "") is None
