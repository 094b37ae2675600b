"""Calls over gRPC whose message does not come, or is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from headwater.gateway.public_grpc.listener import SERVICE
from headwater.gateway.settings import GatewaySettings
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway

INFERENCE = f"/{SERVICE}/"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
METHODS = [INFERENCE + "ListModels", INFERENCE + "ChatStream", HEALTH + "Check", HEALTH + "Watch"]


@pytest.fixture(scope="module")
def strict(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    """A gateway that waits for half a second and, at 16 KiB/s, 4 KiB: 0.75 s."""
    with start_gateway(
        behind, "--slow-body-limit=0.5", "--max-body-bytes=4096", "--max-text-bytes=4096"
    ) as gateway:
        yield gateway


async def refusal_of(
    gateway: Gateway, method: str, messages: AsyncIterator[bytes]
) -> tuple[grpc.StatusCode, str]:
    """The status of a call, as long as it is none of success, and its sentence."""
    async with grpc.aio.insecure_channel(gateway.grpc) as channel, asyncio.timeout(60):
        call: Any = channel.stream_stream(method)(messages)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        return refused.value.code(), refused.value.details() or ""


async def no_message() -> AsyncIterator[bytes]:
    return
    yield


async def late_message() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def garbage() -> AsyncIterator[bytes]:
    yield b"\xff\xff\xff"


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_whose_message_does_not_come_ends_in_its_time(
    strict: Gateway, method: str
) -> None:
    before = strict.refused("slow_message")
    code, sentence = await refusal_of(strict, method, late_message())
    assert (code, sentence) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "the call's message did not come within 0.75 s",
    )
    if method.startswith(INFERENCE):
        assert strict.refused("slow_message") == before + 1


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_a_message_is_refused(strict: Gateway, method: str) -> None:
    code, sentence = await refusal_of(strict, method, no_message())
    assert (code, sentence) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the call has no message; allowed: one",
    )


@pytest.mark.parametrize("method", [INFERENCE + "ListModels", HEALTH + "Check", REFLECTION])
async def test_a_message_that_cannot_be_read_is_refused_as_what_it_is(
    strict: Gateway, method: str
) -> None:
    code, sentence = await refusal_of(strict, method, garbage())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence.startswith("the call's message cannot be read: ")


def test_a_message_has_the_time_of_the_largest_body() -> None:
    assert GatewaySettings().slow_message_limit == 30 + 4 * 64
