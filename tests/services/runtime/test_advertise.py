"""Addresses on which a server listens, and under which other processes reach it."""

from __future__ import annotations

import socket

import pytest

from headwater.gateway.settings import GatewaySettings
from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime.advertise import advertised, listened
from headwater.services.runtime.settings import SettingError
from headwater.services.stack.settings import StackSettings
from headwater.services.text.stage import TextStageSettings


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "10.1.2.3:9000"),
        ("", "10.1.2.3:9000"),
        ("::", "[fd00::7]:9000"),
        ("::1", "[::1]:9000"),
        ("a.b", "a.b:9000"),
    ],
)
def test_a_server_that_listens_everywhere_is_reached_by_the_machines_own_address(
    host: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(name: str, port: None, **hints: object) -> list[tuple[object, ...]]:
        assert (name, port) == (socket.gethostname(), None)
        found = ((socket.AF_INET, ("10.1.2.3", 0)), (socket.AF_INET6, ("fd00::7", 0, 0, 0)))
        return [(family, socket.SOCK_STREAM, 6, "", where) for family, where in found]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    assert advertised(host, 9000) == address


@pytest.mark.parametrize(("has_ipv6", "address"), [(True, "::"), (False, "0.0.0.0")])
def test_a_server_listens_everywhere_also_without_ipv6(
    has_ipv6: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    assert listened("::") == address
    assert listened("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    "settings", [GatewaySettings, EngineSettings, TextStageSettings, StackSettings]
)
def test_an_address_in_brackets_is_refused_with_the_one_that_is_meant(settings: type) -> None:
    with pytest.raises(
        SettingError, match=r"--host is '\[::\]'; allowed: an address without brackets, such as ::"
    ):
        settings(host="[::]")
