from __future__ import annotations

import contextlib
import socket

import pytest

from headwater.services.stack.held_port import HeldPort, check_free


def listener(port: int) -> socket.socket:
    """As a gateway that lets others share its port."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen()
    return made


def test_a_held_port_stays_the_gateways_as_they_come_and_go() -> None:
    with contextlib.closing(HeldPort("127.0.0.1", 0)) as held:
        for _ in range(2):
            with listener(held.port) as gateway, socket.create_connection(gateway.getsockname()):
                connection, _ = gateway.accept()
                connection.close()
            # Between two gateways whoever wants a port gets another one.
            with contextlib.ExitStack() as stack:
                others = [
                    stack.enter_context(contextlib.closing(HeldPort("127.0.0.1", 0)))
                    for _ in range(200)
                ]
                assert held.port not in {other.port for other in others}
            with (
                pytest.raises(OSError, match="in use"),
                socket.create_server(("127.0.0.1", held.port), reuse_port=False),
            ):
                pass


def test_a_port_where_somebody_listens_is_not_taken_though_he_would_share_it() -> None:
    with listener(0) as there:
        port = there.getsockname()[1]
        for take in (check_free, HeldPort):
            with pytest.raises(OSError, match="in use"):
                take("127.0.0.1", port)
