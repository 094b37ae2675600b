"""What attacks send, as real servers receive it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from headwater.bench.hostile import posts
from headwater.bench.hostile.attack import Attack, Target, run_for
from headwater.bench.hostile.controls import OwnWork
from headwater.bench.hostile.grpc_attacks import Calls, HeadReferences, UnreadCalls, small_chat
from headwater.bench.hostile.rest_attacks import OpenHeads, Posts
from headwater.proto import inference_pb2, inference_pb2_grpc

SECONDS = 0.6
"""Length of an attack on a machine that is not busy."""


@dataclass
class Heard:
    """Requests that a server received."""

    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@asynccontextmanager
async def rest_server(status: bytes) -> AsyncIterator[tuple[Target, Heard]]:
    """Answers each request with one status when its body has come."""
    received = Heard()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            received.heads.append(head)
            length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
            received.bodies.append(await reader.readexactly(length))
            writer.write(b"HTTP/1.1 %s Name\r\ncontent-length: 0\r\n\r\n" % status)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            received.heads.append(b"")
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield Target(rest=f"http://{host}:{port}", grpc="", model="m", key="k"), received


class Answering(inference_pb2_grpc.InferenceServicer):
    def __init__(self, received: Heard) -> None:
        self._received = received

    async def Chat(
        self,
        request: inference_pb2.ChatRequest,
        context: grpc.aio.ServicerContext[inference_pb2.ChatRequest, inference_pb2.ChatReply],
    ) -> inference_pb2.ChatReply:
        metadata = dict(context.invocation_metadata() or ())
        self._received.keys.append(str(metadata["authorization"]))
        self._received.bodies.append(request.SerializeToString())
        return inference_pb2.ChatReply(model=request.model)


@asynccontextmanager
async def grpc_server() -> AsyncIterator[tuple[Target, Heard]]:
    received = Heard()
    server = grpc.aio.server(options=(("grpc.absolute_max_metadata_size", 64 * 1024),))
    inference_pb2_grpc.add_InferenceServicer_to_server(Answering(received), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Target(rest="", grpc=f"127.0.0.1:{port}", model="m", key="k"), received
    finally:
        await server.stop(0)


async def seen_at_last(
    attack: Attack, target: Target, is_whole: Callable[[Counter[str]], bool]
) -> Counter[str]:
    """Outcomes of an attack that is tried again, for longer, until they are whole: a busy machine
    may not come to them in a second."""
    for seconds in (SECONDS, 5.0, 60.0):
        seen = await run_for(attack, target, seconds)
        if is_whole(seen):
            break
    return seen


async def test_posts_come_from_each_connection_and_are_counted_by_status() -> None:
    # Each connection has requests of its own numbers.
    expected = {b"no-such-model-0", b"no-such-model-1", b"no-such-model-2"}

    def names() -> set[bytes]:
        return {body.partition(b'"model": "')[2].partition(b'"')[0] for body in received.bodies}

    async with rest_server(b"429") as (target, received):
        attack = Posts(posts.unknown_model, 3, 0.1)
        seen = await seen_at_last(
            attack, target, lambda seen: seen["429"] >= 3 and names() >= expected
        )
    assert set(seen) <= {"429", "no answer"}
    assert seen["429"] >= 3
    assert names() >= expected


async def test_a_slow_body_is_not_there_when_its_time_is_up() -> None:
    async with rest_server(b"200") as (target, received):
        attack = Posts(posts.unknown_model, 2, bytes_per_second=50)
        seen = await run_for(attack, target, SECONDS)
    assert seen == {"no answer": 2}
    assert received.bodies == []


async def test_an_open_head_is_counted_once_a_connection() -> None:
    async with rest_server(b"200") as (target, _):
        assert await run_for(OpenHeads(5), target, SECONDS) == {"no answer": 5}


async def test_a_server_that_is_gone_is_an_outcome() -> None:
    target = Target(rest="http://127.0.0.1:1", grpc="127.0.0.1:1", model="m", key="k")
    attacks: list[Attack] = [Posts(posts.unknown_model, 1), UnreadCalls(1, 2), OpenHeads(1)]
    for attack in attacks:
        seen = await seen_at_last(attack, target, lambda seen: set(seen) == {"closed"})
        assert set(seen) == {"closed"}


async def test_calls_carry_the_tenants_key() -> None:
    async with grpc_server() as (target, received):
        seen = await seen_at_last(Calls(small_chat, 20), target, lambda seen: seen["OK"] >= 20)
    assert seen["OK"] >= 20
    assert set(received.keys) == {"Bearer k"}


@pytest.mark.parametrize(
    ("attack", "outcomes"),
    [
        (UnreadCalls(2, 3), Counter({"no answer": 6})),
        (HeadReferences(2, 3, references=2), Counter({"ended": 6})),
    ],
    ids=["without flow control", "with references in the head"],
)
async def test_frames_by_hand_are_calls_to_a_grpc_server(
    attack: Attack, outcomes: Counter[str]
) -> None:
    async with grpc_server() as (target, received):
        seen = await seen_at_last(attack, target, outcomes.__eq__)
    assert seen == outcomes
    assert set(received.bodies) == {small_chat("m").SerializeToString()}
    assert len(received.bodies) >= outcomes.total()
    assert set(received.keys) == {"Bearer k"}


async def test_a_head_of_several_frames_is_one_head_that_is_refused() -> None:
    async with grpc_server() as (target, received):
        attack = HeadReferences(1, 1, references=16_385)
        seen = await seen_at_last(attack, target, lambda seen: seen["ended"] > 0)
    assert set(seen) == {"ended"}
    assert received.bodies == []


async def test_a_client_that_only_computes_sends_nothing_and_ends_in_time() -> None:
    async with rest_server(b"200") as (target, received):
        assert not await run_for(OwnWork(), target, SECONDS)
    assert not received.heads
