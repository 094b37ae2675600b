"""A child process that does not outlive this one. Its output is read line by line, and it is ended
when reading ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

KEEPER = Path(__file__).with_name("keeper.py")


def keeper_command(*, pipe: int, limit: float) -> list[str]:
    """Prefix of a command that must end when `pipe`, inherited, reaches its end of file."""
    return [sys.executable, "-S", "-E", str(KEEPER), str(pipe), str(limit)]


class KeptChild:
    """Child process. Iterate over its lines (standard output and error together); afterwards
    `returncode` is its exit status."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __iter__(self) -> Iterator[str]:
        assert self._process.stdout is not None
        yield from (line.rstrip() for line in self._process.stdout)
        self._process.wait()

    @property
    def returncode(self) -> int:
        return int(self._process.returncode)


@contextlib.contextmanager
def kept_child(
    command: Sequence[str], *, env: Mapping[str, str] = os.environ
) -> Iterator[KeptChild]:
    """Runs `command` inside the `with` block; whatever ends the scope, or this process, ends the
    child."""
    watched, held = os.pipe()
    process = subprocess.Popen(
        [*keeper_command(pipe=watched, limit=2), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=dict(env),
        pass_fds=[watched],
    )
    os.close(watched)
    try:
        with process:
            try:
                yield KeptChild(process)
            finally:
                os.close(held)
    finally:
        process.wait()
