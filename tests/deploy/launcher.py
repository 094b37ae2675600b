"""Starts containers as processes of this machine: the same commands, variables and files, without
images."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headwater.services.cli.__main__ import STAGES
from headwater.services.runtime.process import PARENT_FD
from headwater.services.stack.embedded import nats_binary, valkey_binary
from tests.deploy.kube_api import Object
from tests.forked_stage import ForkedStage
from tests.stage_log import StageLog


class Running(Protocol):
    """A container that was started."""

    def signal(self, number: int) -> None: ...

    def status(self) -> int | None:
        """The exit status; None while it runs."""


class Launcher(Protocol):
    def close(self) -> None: ...

    async def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        mounts: Mapping[str, Path],
        container: Object,
        within: Running | None = None,
    ) -> Running:
        """`mounts`: folders of this machine by their paths in the container, which `container`
        describes. `within`: the running one that a command of a probe or a hook is for."""


class ForkedContainer:
    """A stage, forked from a process that has imported the libraries: what tests start is started
    cheaply."""

    def __init__(
        self, module: str, flags: Sequence[str], env: Mapping[str, str], log: StageLog, parent: int
    ) -> None:
        self._stage = ForkedStage(
            module, *flags, stderr=log.file, environment=env, **{PARENT_FD: parent}
        )
        self._log = log

    def signal(self, number: int) -> None:
        self._stage.send_signal(number)

    def status(self) -> int | None:
        if (status := self._stage.exitcode) is not None:
            self._log.is_over = True
        return status


class ProcessContainer:
    """Any other program."""

    def __init__(self, process: asyncio.subprocess.Process, log: StageLog) -> None:
        self._process = process
        self._log = log

    def signal(self, number: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def status(self) -> int | None:
        if (status := self._process.returncode) is not None:
            self._log.is_over = True
        return status


class ProcessLauncher:
    """Ends what it started when it is closed, or when this process ends."""

    def __init__(
        self, hosts: Mapping[str, str], kept: Mapping[str, Any], *, forks_stages: bool = True
    ) -> None:
        """`hosts`: addresses by the names of services. `forks_stages`: stages start without their
        imports, which costs least; otherwise as in a container."""
        self._hosts = hosts
        self._kept = kept
        self._forks_stages = forks_stages
        self._watched, self._held = os.pipe()
        self._programs = {
            "headwater": [sys.executable, "-m", "headwater.services.cli"],
            "nats-server": [nats_binary() or "nats-server"],
            "valkey-server": [valkey_binary() or "valkey-server"],
        }

    def close(self) -> None:
        os.close(self._held)
        os.close(self._watched)

    async def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        mounts: Mapping[str, Path],
        container: Object,
        within: Running | None = None,
    ) -> Running:
        own = {key: self._here(value, mounts) for key, value in env.items()}
        program, *arguments = [self._here(each, mounts) for each in command]
        inherited = {
            key: os.environ[key] for key in ("PATH", "PYTHONPATH", "LANG") if key in os.environ
        }
        log = StageLog(name)
        if self._forks_stages and program == "headwater" and arguments[0] == "serve":
            module, _ = STAGES[arguments[1]]
            return ForkedContainer(module, arguments[2:], inherited | own, log, self._watched)
        process = await asyncio.create_subprocess_exec(
            *self._kept["launcher"],
            *self._programs.get(program, [program]),
            *arguments,
            env=inherited | own,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log.file,
            stderr=log.file,
            pass_fds=self._kept["pass_fds"],
        )
        return ProcessContainer(process, log)

    def _here(self, text: str, mounts: Mapping[str, Path]) -> str:
        """With paths of this machine for those of the container, and addresses for the names of
        services."""
        paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        if paths:
            text = re.sub(
                rf"(?<![^=,: ])({paths})(?=/|$)", lambda found: str(mounts[found[1]]), text
            )
        for host, address in self._hosts.items():
            text = re.sub(rf"(?<=[@/]){re.escape(host)}(?=[:/])", address, text)
        return text


TERM = signal.SIGTERM
KILL = signal.SIGKILL
