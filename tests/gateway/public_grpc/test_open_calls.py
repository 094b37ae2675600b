"""The number of calls over gRPC that are open at once."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.gateway.public_grpc.open_calls import OpenCalls
from headwater.gateway.settings import MIN_CALLS, GatewaySettings
from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.services.runtime.errors import LimitExceeded
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind

LIST_MODELS = "/headwater.v1.Inference/ListModels"


async def opened(calls: OpenCalls, tenant: str | None, until: asyncio.Event) -> asyncio.Task[None]:
    """A call that is open until the event, unless it is refused."""

    async def call() -> None:
        calls.count(tenant)
        await until.wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    return task


async def test_a_tenant_that_has_most_calls_leaves_some_to_others_and_health_takes_none() -> None:
    calls = OpenCalls(32)
    until = asyncio.Event()
    tasks = [await opened(calls, "a", until) for _ in range(30)]
    with pytest.raises(
        LimitExceeded,
        match="30 calls are open over gRPC; allowed: 32, twice --max-running and --max-",
    ):
        await (await opened(calls, "a", until))
    tasks += [await opened(calls, "b", until) for _ in range(2)]
    with pytest.raises(LimitExceeded, match="32 calls are open"):
        await (await opened(calls, "b", until))
    tasks.append(await opened(calls, None, until))
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    tasks.append(await opened(calls, "b", until))
    until.set()
    await asyncio.gather(*tasks[1:])


def test_as_many_calls_again_as_run_and_wait_may_be_prepared() -> None:
    assert GatewaySettings().max_calls == 2 * (4096 + 4096)
    assert GatewaySettings(max_running=1, max_queued=0).max_calls == MIN_CALLS


async def test_a_call_too_many_is_refused_though_no_message_came_of_those_that_are_open(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--max-running=1", "--max-queued=1") as gateway:
        async with grpc.aio.insecure_channel(gateway.grpc) as channel, asyncio.timeout(60):
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            health: Any = health_pb2_grpc.HealthStub(channel)

            async def answer(tenant: str) -> tuple[grpc.StatusCode, str]:
                try:
                    await stub.ListModels(
                        inference_pb2.ListModelsRequest(), metadata=(("x-tenant", tenant),)
                    )
                except grpc.aio.AioRpcError as error:
                    return error.code(), error.details() or ""
                return grpc.StatusCode.OK, ""

            open_call = channel.stream_unary(LIST_MODELS)
            # More than are let in: the last sixteenth of the places is for others.
            waiting = [open_call(metadata=(("x-tenant", "a"),)) for _ in range(MIN_CALLS)]
            while (refusal := await answer("a"))[0] is grpc.StatusCode.OK:
                pass
            assert refusal[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "calls are open over gRPC; allowed: 128" in refusal[1]
            assert gateway.refused("rate_limit_exceeded") >= 1
            assert await answer("b") == (grpc.StatusCode.OK, "")
            await health.Check(health_pb2.HealthCheckRequest())
            for call in waiting:
                call.cancel()
            while (again := await answer("a"))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED:
                pass
            assert again == (grpc.StatusCode.OK, "")
