from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.services.cli import doctor
from headwater.services.cli.doctor import examine
from headwater.services.runtime.hardware import (
    gpu_names,
    has_gpu_driver,
    least_gpu_memory,
    unreached_gpus,
)
from headwater.services.runtime.pip_line import pip_line
from headwater.services.stack.cluster_record import ClusterRecord


def test_what_is_installed_here_is_found_and_nothing_blocks_the_line(tmp_path: Path) -> None:
    findings = {
        each.what: each
        for each in examine(cache_dir=tmp_path, state_dir=tmp_path / "new" / "state", ports=())
    }
    assert [each.what for each in findings.values() if each.blocks_up] == []
    assert findings["torch"].found == "installed"
    assert findings["NATS"].found.endswith("nats-server")


def test_servers_elsewhere_are_named_without_their_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_NATS_URL", "nats://gateway:secret@nats.example:4222")
    monkeypatch.setenv("HEADWATER_REDIS_URL", "rediss://:secret@redis.example:6379")
    found = {
        each.what: each.found for each in examine(cache_dir=tmp_path, state_dir=tmp_path, ports=())
    }
    assert found["NATS"] == "outside: nats://nats.example:4222"
    assert found["Redis"] == "outside: rediss://redis.example:6379"


def test_a_port_in_use_comes_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = (
            each
            for each in examine(cache_dir=tmp_path, state_dir=tmp_path, ports=(port,))
            if each.what == f"port {port}"
        )
    assert finding.found == "in use"
    assert "choose another with --port" in finding.remedy


def test_the_ports_of_the_deployment_that_runs_here_are_no_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        addresses = {
            "rest": f"http://127.0.0.1:{port}",
            "grpc": "127.0.0.1:1",
            "nats_url": "",
            "redis_url": "",
        }
        ClusterRecord(pid=os.getpid(), model="m", stages=(), **addresses).write(tmp_path)
        findings = examine(cache_dir=tmp_path, state_dir=tmp_path, ports=(port,))
    ports = {
        each.what: (each.found, each.remedy) for each in findings if each.what.startswith("port")
    }
    assert ports == {
        f"port {port}": ("in use by the deployment that runs here", ""),
        "port 1": ("in use by the deployment that runs here", ""),
    }


def test_a_missing_package_is_installed_for_this_python_by_a_line_for_a_shell() -> None:
    assert pip_line("plots") == f"{sys.executable} -m pip install 'headwater[plots]'"


class Driver:
    """GPUs in the place of those that this machine lacks: what a call writes, by a pair of them."""

    def __init__(
        self, count: int, *, no_access: set[tuple[int, int]], no_atomics: set[tuple[int, int]]
    ) -> None:
        self._count = count
        self._no_access = no_access
        self._no_atomics = no_atomics

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._count
        return 0

    def cuDeviceCanAccessPeer(self, found: Any, one: int, other: int) -> int:
        found._obj.value = (one, other) not in self._no_access
        return 0

    def cuDeviceGetP2PAttribute(self, found: Any, attribute: int, one: int, other: int) -> int:
        assert attribute == 3
        found._obj.value = (one, other) not in self._no_atomics
        return 0


def no_library(name: str) -> Any:
    raise OSError(name)


@pytest.mark.parametrize(
    ("count", "no_access", "no_atomics", "pair"),
    [
        (1, set(), set(), None),
        (4, set(), set(), None),
        (4, {(1, 3), (3, 1)}, set(), (1, 3)),
        (3, set(), {(2, 0)}, (2, 0)),
    ],
)
def test_gpus_that_do_not_reach_one_another_are_named(
    count: int,
    no_access: set[tuple[int, int]],
    no_atomics: set[tuple[int, int]],
    pair: tuple[int, int] | None,
) -> None:
    assert (
        unreached_gpus(lambda name: Driver(count, no_access=no_access, no_atomics=no_atomics))
        == pair
    )
    assert unreached_gpus(no_library) is None


class Lister:
    """The driver's list of GPUs, of which some have fallen off the bus; -1 GPUs: a driver that does
    not answer."""

    def __init__(self, count: int, lost: set[int]) -> None:
        self._count = count
        self._lost = lost

    def nvmlInit_v2(self) -> int:
        return int(self._count < 0)

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self._count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, i: int, handle: Any) -> int:
        handle._obj.value = 100 + i
        return int(i in self._lost)

    def nvmlDeviceGetName(self, handle: Any, name: Any, num_bytes: int) -> int:
        name.value = b"L4 of %d" % handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = handle.value << 30
        return 0

    def nvmlShutdown(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("count", "lost", "names", "least"),
    [
        (-1, set(), (), 0),
        (0, set(), (), 0),
        (2, set(), ("L4 of 100", "L4 of 101"), 100),
        (3, {0}, ("L4 of 101", "L4 of 102"), 101),
    ],
)
def test_gpus_are_listed_by_the_driver(
    count: int, lost: set[int], names: tuple[str, ...], least: int
) -> None:
    assert gpu_names(lambda library: Lister(count, lost)) == names
    assert least_gpu_memory(lambda library: Lister(count, lost)) == least << 30
    assert (gpu_names(no_library), least_gpu_memory(no_library)) == ((), 0)
    assert has_gpu_driver(lambda library: Lister(count, lost))
    assert not has_gpu_driver(no_library)


def test_the_doctor_says_that_ranks_on_such_gpus_exchange_through_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "gpu_names", lambda: ("L4", "L4"))
    monkeypatch.setattr(doctor, "unreached_gpus", lambda: (0, 1))
    assert doctor._gpu().found == (
        "L4, L4; GPUs 0 and 1 do not reach one another's memory, so ranks exchange through the "
        "host's, slower"
    )
