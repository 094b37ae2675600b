"""Memory that a holder keeps between two lives of an engine. Files in memory stand for a
device's."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.engine_core.system import memory_holder
from headwater.engine_core.system.held_memory import HeldMemory, MemoryHolder, held_bytes

GUARD_SECONDS = 60
KEEPER = """
import os, socket, sys
from headwater.engine_core.system.held_memory import HeldMemory, MemoryHolder

files = [os.memfd_create(name) for name in ("memory", "layout")]
os.write(files[0], b"weights")
os.write(files[1], b"layout")
held = HeldMemory(memory=files[0], layout=files[1], num_bytes=7, checksum=-3)
print(MemoryHolder(int(sys.argv[1])).keep("key", held), flush=True)
sys.stdin.read()
"""


class Engine:
    """The life of an engine that has had its weights held."""

    def __init__(self, requests: socket.socket) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(requests.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[requests.fileno()],
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"True\n"

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Holder:
    """A holder's process, and the engines' end of its socket."""

    def __init__(self) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", memory_holder.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self.client = MemoryHolder(self.requests.fileno())

    @property
    def num_held(self) -> int:
        """Files of a device, or of a layout, that it has open."""
        links = Path(f"/proc/{self._process.pid}/fd").iterdir()
        return sum(os.readlink(link).startswith("/memfd:") for link in links)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(GUARD_SECONDS)

    def close(self) -> None:
        """Closes the last end from which anyone could ask: it ends by itself."""
        self.requests.close()
        self._process.wait(GUARD_SECONDS)


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.close()


def contents(held: HeldMemory) -> list[bytes]:
    return [os.pread(file, 100, 0) for file in held.files]


def test_memory_goes_to_the_restarted_engine_and_to_the_one_after_it(holder: Holder) -> None:
    for _ in range(2):
        Engine(holder.requests).kill()
        held = holder.client.take("key")
        assert held is not None
        assert contents(held) == [b"weights", b"layout"]
        assert (held.num_bytes, held.checksum) == (7, -3)
        held.close()
        assert holder.num_held == 2


def test_memory_goes_to_the_restarted_engine_when_the_last_one_has_ended(holder: Holder) -> None:
    engine = Engine(holder.requests)
    dead = os.pidfd_open(engine.pid)
    os.kill(engine.pid, signal.SIGKILL)
    held = holder.client.take("key")
    assert held is not None
    assert select.select([dead], [], [], 0)[0]
    held.close()
    os.close(dead)
    engine.kill()


def test_memory_goes_to_nobody_while_the_process_lives_that_may_write_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_holder, "DEATH_SECONDS", 0)
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    serving = threading.Thread(target=memory_holder.HolderServer(theirs).serve)
    serving.start()
    engine = Engine(requests)
    client = MemoryHolder(requests.fileno())
    assert client.take("key") is None
    engine.kill()
    held = client.take("key")
    assert held is not None
    held.close()
    client.drop()
    assert client.take("key") is None
    requests.close()
    serving.join(GUARD_SECONDS)
    theirs.close()


def test_memory_of_other_weights_is_given_back(holder: Holder) -> None:
    engine = Engine(holder.requests)
    assert holder.num_held == 2
    assert held_bytes(holder.requests.fileno()) == 7
    assert holder.client.take("another key") is None
    assert holder.num_held == 0
    assert held_bytes(holder.requests.fileno()) == 0
    engine.kill()


def test_held_memory_replaces_all_that_was_held_before(holder: Holder) -> None:
    for _ in range(3):
        engine = Engine(holder.requests)
        assert holder.num_held == 2
        engine.kill()
    holder.client.drop()
    assert holder.num_held == 0


def test_a_holder_that_is_gone_holds_nothing(holder: Holder) -> None:
    Engine(holder.requests).kill()
    holder.kill()
    assert holder.client.take("key") is None
    with open(os.devnull) as file:
        number = file.fileno()
        held = HeldMemory(memory=number, layout=number, num_bytes=0, checksum=0)
        assert not holder.client.keep("key", held)
    holder.client.drop()
