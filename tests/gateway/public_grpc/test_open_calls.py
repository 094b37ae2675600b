"""The number of calls over gRPC that are open at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.gateway.public_grpc.open_calls import OpenCalls
from headwater.gateway.settings import MIN_CALLS, GatewaySettings
from headwater.gateway.tenancy.peers import KEPT
from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.services.runtime.errors import LimitExceeded
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind

LIST_MODELS = "/headwater.v1.Inference/ListModels"
ALONE = (("grpc.use_local_subchannel_pool", 1),)
"""Option of a channel with a connection of its own."""


async def opened(
    count: Callable[[str], None], owner: str, until: asyncio.Event
) -> asyncio.Task[None]:
    """A call that is open until the event, unless it is refused."""

    async def call() -> None:
        count(owner)
        await until.wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    return task


async def test_a_tenant_that_has_most_calls_leaves_some_to_others_and_health_takes_none() -> None:
    calls = OpenCalls(32)
    until = asyncio.Event()
    tasks = [await opened(calls.count, "a", until) for _ in range(30)]
    with pytest.raises(
        LimitExceeded,
        match="30 calls are open over gRPC; allowed: 32, twice --max-running and --max-",
    ):
        await (await opened(calls.count, "a", until))
    tasks += [await opened(calls.count, "b", until) for _ in range(2)]
    with pytest.raises(LimitExceeded, match="32 calls are open"):
        await (await opened(calls.count, "b", until))
    tasks.append(await opened(calls.count_without_key, "10.0.0.1", until))
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    tasks.append(await opened(calls.count, "b", until))
    until.set()
    await asyncio.gather(*tasks[1:])


async def test_a_client_without_a_key_leaves_some_calls_to_others() -> None:
    calls = OpenCalls(32)
    until = asyncio.Event()
    tasks = [await opened(calls.count_without_key, "10.0.0.1", until) for _ in range(30)]
    with pytest.raises(LimitExceeded, match="30 calls are open over gRPC"):
        await (await opened(calls.count_without_key, "10.0.0.1", until))
    tasks.append(await opened(calls.count_without_key, "10.0.0.2", until))
    until.set()
    await asyncio.gather(*tasks)


async def test_one_clients_health_checks_leave_places_to_other_clients(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--max-running=1", "--max-queued=1") as gateway:
        async with contextlib.AsyncExitStack() as scope:
            # Of the same address; a connection carries as many calls as are open in all.
            first, second = [
                await scope.enter_async_context(grpc.aio.insecure_channel(gateway.grpc, ALONE))
                for _ in range(2)
            ]
            stubs: list[Any] = [health_pb2_grpc.HealthStub(each) for each in (first, second)]
            watches = [stubs[0].Watch(health_pb2.HealthCheckRequest()) for _ in range(MIN_CALLS)]
            first_words = await asyncio.gather(
                *(watch.read() for watch in watches), return_exceptions=True
            )
            refused = [each for each in first_words if isinstance(each, grpc.aio.AioRpcError)]
            assert len(refused) == MIN_CALLS // KEPT
            with pytest.raises(grpc.aio.AioRpcError, match="calls are open over gRPC"):
                await stubs[1].Check(health_pb2.HealthCheckRequest())


def test_as_many_calls_again_as_run_and_wait_may_be_prepared() -> None:
    assert GatewaySettings().max_calls == 2 * (4096 + 4096)
    assert GatewaySettings(max_running=1, max_queued=0).max_calls == MIN_CALLS


async def test_a_call_too_many_is_refused_though_no_message_came_of_those_that_are_open(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--max-running=1", "--max-queued=1") as gateway:
        async with (
            grpc.aio.insecure_channel(gateway.grpc, ALONE) as channel,
            grpc.aio.insecure_channel(gateway.grpc, ALONE) as other,
            asyncio.timeout(60),
        ):
            stub: Any = inference_pb2_grpc.InferenceStub(other)
            health: Any = health_pb2_grpc.HealthStub(other)

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
