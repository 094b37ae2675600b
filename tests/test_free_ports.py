"""Ports that tests give to servers that start later."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest

from tests import free_ports

OTHER_PORTS = range(5_000, 10_000)
"""Ports that neither other tests nor the system give away."""
TAKES_ONE = """
import sys
from tests import free_ports
free_ports._PORTS = [int(port) for port in sys.argv[1:]]
print(free_ports.free_port(), flush=True)
sys.stdin.read()
"""


def test_a_port_that_another_process_was_given_is_not_given_before_that_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = list[int]()
    with ExitStack() as bound:
        while len(ports) < 2:
            with suppress(OSError):
                port = random.SystemRandom().choice(OTHER_PORTS)
                bound.enter_context(socket.create_server((free_ports.HOST, port)))
                ports.append(port)
    monkeypatch.setattr(free_ports, "_PORTS", ports)
    command = [sys.executable, "-c", TAKES_ONE, *map(str, ports)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        given = int(other.stdout.readline())
        assert {free_ports.free_port() for _ in range(30)} == set(ports) - {given}
        other.communicate()
    assert {free_ports.free_port() for _ in range(30)} == set(ports)
