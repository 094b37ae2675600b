"""How a line ends: in order, at once, or without its supervisor. It leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.processes import UNDRAFTED
from tests.line.conftest import Line
from tests.line.test_line_access import env_of
from tests.machine_stalls import MachineStalls
from tests.shared_memory import shared_memory_of

MODEL = "smollm2-135m-instruct"
ROLES = ("gateway", "processor", "output-processor", "engine", "operator")
SMALL = ("--executor=simulated", "--replicas=2")
LONG = 400
"""Tokens of an answer that is read to its end: it takes four seconds."""


def still_listening(addresses: list[tuple[str, int]]) -> list[tuple[str, int]]:
    listening = []
    for address in addresses:
        with socket.socket() as probe:
            if probe.connect_ex(address) == 0:
                listening.append(address)
    return listening


def wait_until_it_knows_all(line: Any) -> None:
    """The gateway reaches every stage and has each engine's index: a moment after they are
    ready."""

    def knows_all() -> bool:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        reply = line.client.post(
            "/v1/chat/completions", json=body, headers={"x-headwater-receipt": "1"}
        )
        if reply.status_code != 200:
            return False
        candidates = reply.json()["receipt"]["decision"]["candidates"]
        return len(candidates) == 2 and all(each["synced"] for each in candidates)

    line.wait_for(knows_all, 60, "the gateway does not know all stages")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def files_under(folder: Path, *, but: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and but not in path.parents]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "tmp").mkdir()
    return folder


@pytest.fixture(scope="module")
def deployed(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A line whose processes start as in a deployment, with a home of its own. The last test that
    uses it ends it."""
    env = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    with Line(tmp_path_factory.mktemp("deployed"), *SMALL, "--drain-limit=60", env=env) as line:
        yield line


@pytest.fixture(scope="module")
def abandoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A line under nohup whose output nobody reads. The last test that uses it ends it."""
    reading, writing = os.pipe()
    os.close(reading)

    def start(*arguments: str, environment: dict[str, str], output: int) -> subprocess.Popen[bytes]:
        command = ["nohup", sys.executable, "-m", "headwater.services.cli", *arguments]
        return subprocess.Popen(
            command, stdout=writing, stderr=output, env=environment, start_new_session=True
        )

    folder = tmp_path_factory.mktemp("abandoned")
    with contextlib.ExitStack() as stack:
        try:
            line = stack.enter_context(
                Line(folder, "--executor=simulated", "--replicas=1", start=start)
            )
        finally:
            os.close(writing)
        yield line


@pytest.mark.slow
def test_no_secret_is_on_a_command_line_or_in_a_file_of_others(deployed: Line) -> None:
    token, key = (
        (deployed.state_dir / name).read_text().strip() for name in ("cluster.token", "master.key")
    )
    passwords = {
        password
        for role in ROLES
        for url in (
            env_of(deployed, role)["HEADWATER_NATS_URL"],
            env_of(deployed, role)["HEADWATER_REDIS_URL"],
        )
        if (password := urlsplit(url).password)
    }
    assert len(passwords) == len(ROLES)
    shown = "\n".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in deployed.pids())
    assert "headwater.services.engine.core.process" in shown
    logs = "\n".join(path.read_text() for path in (deployed.state_dir / "logs").iterdir())
    for secret in {token, key, *passwords}:
        assert secret not in shown
        assert secret not in logs + deployed.log.read_text()
    kept = [path for path in deployed.state_dir.rglob("*") if path.is_file()]
    secret_files = {
        path
        for path in kept
        if any(each.encode() in path.read_bytes() for each in {token, key, *passwords})
    }
    assert deployed.state_dir / "access/nats/nats.conf" in secret_files
    assert {path.stat().st_mode & 0o777 for path in secret_files} == {0o600}


@pytest.mark.slow
def test_stages_outlive_the_server_that_forked_them_and_start_again_without_it(
    deployed: Line,
) -> None:
    line = deployed
    before = {stage.name: stage.pid for stage in line.record.stages if "grpc" in stage.addresses}
    [server] = [
        pid
        for pid in line.pids()
        if "runtime.fork_server" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert {parent_of(pid) for pid in before.values()} == {server}
    with line.stream("Once upon a time", max_tokens=LONG, ignore_eos=True, **UNDRAFTED) as events:
        next(events)
        os.kill(server, signal.SIGKILL)
        *_, last = events
    assert last["choices"][0]["finish_reason"] == "length"

    def is_back(name: str) -> bool:
        return line.pid_of(name) != before[name]

    for victim in ("processor-0", "engine-0"):
        os.kill(before[victim], signal.SIGKILL)
        line.wait_for(partial(is_back, victim), 60, f"{victim} is not back")
    assert {stage.name for stage in line.record.stages if before.get(stage.name) == stage.pid} == {
        *("engine-1", "gateway-0", "output-processor-0")
    }
    wait_until_it_knows_all(line)


@pytest.mark.slow
def test_ctrl_c_finishes_what_runs_and_leaves_no_process_no_port_and_no_file_outside_its_folders(
    deployed: Line, home: Path
) -> None:
    line = deployed
    pids = line.pids()
    addresses = line.addresses()
    shared_memory = shared_memory_of(*pids)
    assert len(pids) >= 12, (
        "supervisor, server of forks, keepers of two servers, five stages, two engine cores"
    )
    assert still_listening(addresses) == addresses
    with line.stream("Once upon a time", max_tokens=LONG, ignore_eos=True, **UNDRAFTED) as events:
        next(events)
        line.process.send_signal(signal.SIGINT)
        *_, last = events
    assert last["choices"][0]["finish_reason"] == "length"
    assert line.process.wait(60) == 0, line.log.read_text()
    assert line.wait_ended(pids, 0) == []
    assert still_listening(addresses) == []
    assert files_under(home, but=line.state_dir) == []
    assert [path for path in shared_memory if path.exists()] == []
    left = {path.name for path in line.state_dir.iterdir()}
    assert left == {"cluster.token", "lock", "logs", "master.key", "nats", "up.log"}


@pytest.mark.slow
def test_a_cluster_under_nohup_stays_when_its_terminal_and_the_reader_of_its_output_go(
    abandoned: Line,
) -> None:
    line = abandoned
    line.process.send_signal(signal.SIGHUP)
    before = line.pid_of("processor-0")
    # The supervisor reports this death on its terminal.
    os.kill(before, signal.SIGKILL)
    line.wait_for(lambda: line.pid_of("processor-0") != before, 60, "processor-0 is not back")


@pytest.mark.slow
def test_no_process_outlives_the_supervisor(abandoned: Line) -> None:
    line = abandoned
    with line.stream("Once upon a time", max_tokens=7000, ignore_eos=True, **UNDRAFTED) as events:
        next(events)
        pids = line.pids()
        addresses = line.addresses()
        shared_memory = shared_memory_of(*pids)
        line.kill()
        assert line.wait_ended(pids, 60) == []
    assert still_listening(addresses) == []
    assert [path for path in shared_memory if path.exists()] == []


@pytest.mark.long
def test_every_process_ends_within_two_seconds_of_the_supervisors_death(start_line: Any) -> None:
    line = start_line("--executor=simulated", "--replicas=1")
    with line.stream("Once upon a time", max_tokens=7000, ignore_eos=True, **UNDRAFTED) as events:
        next(events)
        pids = line.pids()
        with MachineStalls() as stalls:
            began = time.monotonic()
            line.kill()
            assert line.wait_ended(pids, 60) == []
            ended = time.monotonic()
            assert ended - began - stalls.seconds_between(began, ended) < 2


@pytest.mark.slow
def test_each_stage_drains_on_sigterm_exits_with_status_0_and_is_started_again(
    simulated_line: Any,
) -> None:
    line = simulated_line
    *_, last = line.record.stages
    assert last.name == "gateway-0"
    question = [
        {
            "role": "user",
            "content": "Is this prompt long enough to fill a block or two of the cache? Let us see.",
        }
    ]
    for stage in line.record.stages:
        if stage == last:
            wait_until_it_knows_all(line)
            line.chat(question)
        os.kill(stage.pid, signal.SIGTERM)
        line.wait_for(
            lambda name=stage.name: f"{name} ended with status 0" in line.log.read_text(),
            60,
            stage.name,
        )
        line.wait_for(
            lambda old=stage: line.pid_of(old.name) != old.pid, 60, f"{stage.name} is not back"
        )
    wait_until_it_knows_all(line)
    answer = line.chat(question, headers={"x-headwater-receipt": "1"})
    decision = answer["receipt"]["decision"]
    matched = {each["replica_id"]: each["matched_tokens"] for each in decision["candidates"]}
    assert any(matched.values()), "a gateway that comes back keeps its tenants' namespaces"
    # Another replica may be chosen: learned speeds may differ by more than the prefix saves.
    if matched[decision["replica_id"]]:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_second_line_with_the_same_state_folder_is_refused(simulated_line: Any) -> None:
    command = [
        sys.executable,
        "-m",
        "headwater.services.cli",
        "up",
        f"--state-dir={simulated_line.state_dir}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "choose another with --state-dir" in done.stderr
