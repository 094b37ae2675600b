"""Tries the planes behind a gateway from a container without secrets: `try_stranger.py ENGINE…`.
Fails if one opens."""

from __future__ import annotations

import socket
import sys

import grpc

from headwater.proto import engine_pb2, engine_pb2_grpc


def answers(host: str, port: int, request: bytes) -> bytes:
    """All that the server sends on a connection of its own."""
    with (
        socket.create_connection((host, port), timeout=10) as client,
        client.makefile("rb") as reader,
    ):
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return reader.read()


def drained(engine: str) -> grpc.StatusCode:
    """The status of an attempt to drain the engine."""
    with grpc.insecure_channel(f"{engine}:9000") as channel:
        try:
            engine_pb2_grpc.EngineStub(channel).Drain(engine_pb2.DrainRequest(), timeout=10)
        except grpc.RpcError as refusal:
            return refusal.code()
    return grpc.StatusCode.OK


def main(engines: list[str]) -> None:
    redis = answers("redis", 6379, b"KEYS *\r\n")
    nats = answers("nats", 4222, b'CONNECT {"verbose":true}\r\nSUB > 1\r\nPING\r\n').splitlines()[
        -1
    ]
    drains = {engine: drained(engine) for engine in engines}
    print(
        f"a stranger: redis {redis.strip()!r}, nats {nats!r}",
        *(f"{each} {drains[each].name}" for each in drains),
    )
    assert redis == b"-NOAUTH Authentication required.\r\n"
    assert nats == b"-ERR 'Authorization Violation'"
    assert set(drains.values()) == {grpc.StatusCode.UNAUTHENTICATED}


if __name__ == "__main__":
    main(sys.argv[1:])
