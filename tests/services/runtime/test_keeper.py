"""A foreign program ends with its keeper, its supervisor, or by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.services.runtime.kept_child import keeper_command, kept_child
from tests.polling import holds_within


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)


def keep(command: list[str], pipe: int, limit: float = 5) -> subprocess.Popen[str]:
    argv = [*keeper_command(pipe=pipe, limit=limit), *command]
    return subprocess.Popen(argv, pass_fds=[pipe], stdout=subprocess.PIPE, text=True)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_gone(pid: int) -> bool:
    return holds_within(lambda: not is_alive(pid), 60)


def test_the_status_of_a_program_that_ends_is_its_keepers(pipe: tuple[int, int]) -> None:
    keeper = keep(["sh", "-c", "exit 7"], pipe[0])
    with keeper:
        assert keeper.wait(60) == 7
    os.close(pipe[1])


def test_a_program_ends_when_the_supervisors_pipe_closes(pipe: tuple[int, int]) -> None:
    with keep(["sh", "-c", "echo $$; exec sleep 600"], pipe[0]) as keeper:
        assert keeper.stdout is not None
        pid = int(keeper.stdout.readline())
        os.close(pipe[1])
        assert keeper.wait(60) == 0
        assert wait_gone(pid)


def test_a_program_that_ignores_sigterm_is_killed_after_the_limit(pipe: tuple[int, int]) -> None:
    with keep(
        ["sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done"], pipe[0], limit=0.2
    ) as keeper:
        assert keeper.stdout is not None
        pid = int(keeper.stdout.readline())
        keeper.terminate()
        assert keeper.wait(60) == 0
        assert wait_gone(pid)
    os.close(pipe[1])


def test_a_program_ends_when_its_keeper_is_killed(pipe: tuple[int, int]) -> None:
    with keep(["sh", "-c", "echo $$; exec sleep 600"], pipe[0]) as keeper:
        assert keeper.stdout is not None
        pid = int(keeper.stdout.readline())
        keeper.kill()
        assert wait_gone(pid)
    os.close(pipe[1])


def test_a_kept_child_gives_its_lines_and_its_status() -> None:
    with kept_child(["sh", "-c", "echo one; echo two >&2; exit 3"]) as child:
        assert list(child) == ["one", "two"]
    assert child.returncode == 3


def test_leaving_the_scope_early_ends_a_kept_child() -> None:
    with kept_child(["sh", "-c", "echo $$; exec sleep 600"]) as child:
        pid = int(next(iter(child)))
    assert wait_gone(pid)
