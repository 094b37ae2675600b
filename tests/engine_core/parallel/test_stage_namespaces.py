"""A stage in a network namespace of its own, joined to the engine's by a virtual cable: answers,
and the cable cut."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from headwater.engine_core.parallel.rank_facts import RankLost
from tests.engine_core.parallel.parallel_models import QWEN3, engine_of, folder_of
from tests.engine_core.parallel.test_pipeline_parallel import reported
from tests.engine_core.parallel.test_stage_hosts import PROMPT, Loss
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS
from tests.engine_core.small_models import greedy
from tests.forked_host import forked_host, write_secret

pytestmark = pytest.mark.slow

CLONE_NEWNET = 0x40000000
PORT = 7300


@dataclass(frozen=True)
class Network:
    namespace: str
    cable: str
    """The engine's end."""
    address: str
    """Of the engine, at its end of the cable."""
    host: str
    """Of the other end."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    number = os.getpid() % (1 << 14)
    subnet = f"10.213.{number // 64 % 256}.{number % 64 * 4}"
    first, _, last = subnet.rpartition(".")
    ours = f"{first}.{int(last) + 1}"
    theirs = f"{first}.{int(last) + 2}"
    name = f"headwater-{number}"
    cable = f"hw{number}a"
    other = f"hw{number}b"
    try:
        run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not make network namespaces: {error}")
    try:
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", other, "netns", name)
        run("ip", "address", "add", f"{ours}/30", "dev", cable)
        run("ip", "link", "set", cable, "up")
        run("ip", "-n", name, "address", "add", f"{theirs}/30", "dev", other)
        run("ip", "-n", name, "link", "set", other, "up")
        yield Network(name, cable, f"{ours}:{PORT}", theirs)
    finally:
        # Its end of the cable goes with it, and so the other one.
        run("ip", "netns", "delete", name)


def enter(namespace: str) -> None:
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(descriptor, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.close(descriptor)


@pytest.mark.long
def test_a_stage_of_another_network_answers_to_the_bit_and_is_lost_when_the_cable_is_cut(
    network: Network, tmp_path: Path
) -> None:
    folder = folder_of(QWEN3, tmp_path)[1]
    secret = write_secret(tmp_path)
    asked = {
        "pipeline_parallel_size": 2,
        "stage_hosts": 1,
        "stage_listen": network.address,
        "stage_secret_file": secret,
    }
    scored = greedy(12, num_logprobs=3)
    with engine_of(folder) as one:
        expected = reported(one.answer(PROMPTS, scored))
    with forked_host(
        network.address, secret, folder, prepare=partial(enter, network.namespace)
    ) as host:
        with engine_of(folder, **asked) as engine:
            assert reported(engine.answer(PROMPTS, scored)) == expected
            loss, [pid], began = Loss(engine), host.rank_pids, time.monotonic()
            timer = threading.Timer(0.5, run, ("ip", "link", "set", network.cable, "down"))
            timer.start()
            with pytest.raises(RankLost):
                engine.answer([PROMPT[:20]] * 8, greedy(900))
            timer.join()
            lost = loss.wait()
            assert loss.at - began > 2
            assert f"(stage 1 on {network.host}) " in str(lost) or "rank 0 " in str(lost)
            assert host.says(f"the engine at {network.address} has been silent for ", 60)
        run("ip", "link", "set", network.cable, "up")
        with engine_of(folder, **asked) as again:
            assert reported(again.answer(PROMPTS, scored)) == expected
            assert [pid] != host.rank_pids
