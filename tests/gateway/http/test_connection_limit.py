"""The number of connections that clients have open over REST."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from collections.abc import Iterator

import pytest

from headwater.gateway.http.connection_limit import (
    OWN_FILES,
    SPARE_CONNECTIONS,
    WATCHED,
    connections_allowed,
    relayed_connections_allowed,
)
from headwater.gateway.settings import MIN_CALLS, GatewaySettings
from headwater.gateway.tenancy.peers import KEPT
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway

MOST_OF_ONE = MIN_CALLS - MIN_CALLS // KEPT
"""Connections that the client has that has most: it leaves the others to others."""
OTHER = "127.0.0.2"
"""Address of another client."""
HEALTH = "HEAD /health HTTP/1.1\r\nhost: localhost\r\n"
CLOSING = "connection: close\r\n\r\n"
CHAT_HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)


@pytest.fixture
def small(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    """A gateway that has as few connections as may be."""
    with start_gateway(behind, "--max-running=1", "--max-queued=0") as gateway:
        # Its next request goes over a new connection.
        gateway.client.get("/health", headers={"connection": "close"})
        yield gateway


def connected(gateway: Gateway, client: str = "127.0.0.1") -> socket.socket:
    host, _, port = gateway.rest.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60, source_address=(client, 0))


def begun(gateway: Gateway, client: str = "127.0.0.1") -> socket.socket:
    """A connection with a request that lacks its end."""
    connection = connected(gateway, client)
    connection.sendall(f"GET /v1/models/{MODEL} HTTP/1.1\r\nhost: localhost\r\n".encode())
    return connection


def answer(connection: socket.socket, sent: str = "") -> tuple[str, bytes]:
    """Head and body of what is answered, up to the end of the connection."""
    connection.sendall(sent.encode())
    head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return head.decode(), body


def test_a_connection_too_many_is_refused_before_its_body_and_health_checks_are_answered(
    small: Gateway,
) -> None:
    with contextlib.ExitStack() as scope:
        busy = [scope.enter_context(begun(small)) for _ in range(MOST_OF_ONE)]
        # This one is past the limit too, and closed by each answer.
        small.wait_until(lambda: small.metric("headwater_num_connections") == MOST_OF_ONE + 1)
        for path in WATCHED:
            assert small.client.get(path).status_code == 200
        # Nothing comes of the body, and no leave to send it.
        surplus = scope.enter_context(connected(small))
        head, body = answer(
            surplus, CHAT_HEAD + "content-length: 1000\r\nexpect: 100-continue\r\n\r\n"
        )
        assert head.startswith("HTTP/1.1 503 ")
        assert "\r\nretry-after: 1" in head
        assert "\r\nconnection: close" in head
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("server_error", "too_many_connections")
        assert "allowed: 128, twice --max-running and --max-queued" in error["message"]
        assert small.refused("too_many_connections") == 1
        # Those that were there before are served.
        assert answer(busy[0], CLOSING)[0].startswith("HTTP/1.1 200 ")
    small.wait_until(lambda: small.metric("headwater_num_connections") == 1)
    assert small.chat()["choices"]


def test_the_last_of_very_many_connections_are_refused_unread(small: Gateway) -> None:
    with contextlib.ExitStack() as scope:
        for _ in range(MOST_OF_ONE + SPARE_CONNECTIONS):
            scope.enter_context(begun(small))
        head, body = answer(scope.enter_context(connected(small)))
        assert head.startswith("HTTP/1.1 503 ")
        assert "\r\nretry-after: 1" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
    small.wait_until(lambda: small.metric("headwater_num_connections") == 1)
    assert small.refused("too_many_connections") == 1


def test_the_connection_that_was_idle_for_longest_makes_room_for_one_more(small: Gateway) -> None:
    with contextlib.ExitStack() as scope:
        first, second = (scope.enter_context(connected(small)) for _ in range(2))
        for _ in range(MOST_OF_ONE - 2):
            scope.enter_context(begun(small))
        # Now the first one has been idle for a shorter time.
        first.sendall(f"{HEALTH}\r\n".encode())
        assert first.recv(1000).startswith(b"HTTP/1.1 200 ")
        second.setblocking(False)
        small.wait_until(lambda: knocks(small) and is_closed(second))
        assert answer(first, HEALTH + CLOSING)[0].startswith("HTTP/1.1 200 ")


def test_the_client_that_has_most_connections_leaves_some_to_others(small: Gateway) -> None:
    with contextlib.ExitStack() as scope:
        for _ in range(MOST_OF_ONE):
            scope.enter_context(begun(small))
        surplus = scope.enter_context(connected(small))
        assert answer(surplus, CHAT_HEAD + "content-length: 9\r\n\r\n")[0].startswith(
            "HTTP/1.1 503 "
        )
        for _ in range(MIN_CALLS // KEPT):
            other = scope.enter_context(begun(small, OTHER))
        assert answer(other, CLOSING)[0].startswith("HTTP/1.1 200 ")


def test_a_flood_closes_no_idle_connection_of_a_client_that_has_fewer(small: Gateway) -> None:
    with contextlib.ExitStack() as scope:
        idle = scope.enter_context(connected(small, OTHER))
        own = scope.enter_context(connected(small))
        for _ in range(MOST_OF_ONE - 2):
            scope.enter_context(begun(small))
        own.setblocking(False)
        # Both are idle for as long.
        small.wait_until(lambda: knocks(small) and is_closed(own))
        scope.enter_context(begun(small))
        surplus = scope.enter_context(connected(small))
        chat = CHAT_HEAD + "content-length: 9\r\n\r\n"
        assert answer(surplus, chat)[0].startswith("HTTP/1.1 503 ")
        assert answer(idle, HEALTH + CLOSING)[0].startswith("HTTP/1.1 200 ")


def knocks(gateway: Gateway) -> bool:
    with connected(gateway) as connection:
        return answer(connection, HEALTH + CLOSING)[0].startswith("HTTP/1.1 200 ")


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def limited(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[int]:
    """Limits of open files of this process, as they are set."""
    limits = [soft, hard]

    def set_limits(_: int, asked: tuple[int, int]) -> None:
        limits[:] = asked

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    return limits


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "allowed"),
    [
        (1024, 1024, 1024, 1024 - OWN_FILES[0]),
        (1024, 4096, 4000, 3000),
        (1024, resource.RLIM_INFINITY, 4000, 3000),
        (65536, 65536, 65536, 3000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 3000),
        (100, 100, 100, 1),
    ],
)
def test_open_files_are_raised_for_connections_as_far_as_that_goes(
    soft: int, hard: int, raised: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = limited(monkeypatch, soft, hard)
    assert connections_allowed(3000) == allowed
    assert limits == [raised, hard]


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "allowed"),
    [
        # A client's connection has three open files.
        (1024, 1024, 1024, OWN_FILES[0] // 2 // 3),
        (1024, 8000, 8000, (8000 - 3000 - 1000) // 3),
        (1024, resource.RLIM_INFINITY, 3000 + 1000 + 9000, 3000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 3000),
    ],
)
def test_connections_over_grpc_leave_open_files_to_those_over_rest(
    soft: int, hard: int, raised: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = limited(monkeypatch, soft, hard)
    num_rest = connections_allowed(3000)
    assert relayed_connections_allowed(3000, num_rest) == allowed
    assert limits == [raised, hard]


def test_gateways_of_default_size_leave_a_bounded_number_of_open_files_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = GatewaySettings().max_calls
    limits = wanted + OWN_FILES[1], resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    assert connections_allowed(wanted) == wanted
