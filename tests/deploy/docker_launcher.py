"""Starts containers by Docker as Kubernetes does: from images, with roots that are read-only and a
user without rights.

Pods share this machine's network and have addresses of their own on loopback, as `ProcessLauncher`
gives them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.deploy.kube_api import Object
from tests.deploy.launcher import ProcessContainer, Running
from tests.stage_log import StageLog

SHARED_MEMORY = "/dev/shm"
CHART_USER = 10001


def missing_for(images: Sequence[str]) -> str:
    """What is missing here to run containers of these images, in a sentence; empty: nothing."""
    if shutil.which("docker") is None or _docker("info").returncode:
        return "no Docker answers"
    absent = [image for image in images if _docker("image", "inspect", image).returncode]
    return f"no images {', '.join(absent)} (deploy/Dockerfile)" if absent else ""


def _docker(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["docker", *arguments], capture_output=True, timeout=60, check=False)


class DockerContainer:
    """A container that runs. It is removed when it has ended."""

    def __init__(self, identity: str, log: StageLog) -> None:
        self.identity = identity
        self._log = log
        self._end = asyncio.ensure_future(self._wait())

    def signal(self, number: int) -> None:
        if not self._end.done():
            command = ["docker", "kill", "--signal", signal.Signals(number).name, self.identity]
            subprocess.run(command, capture_output=True, timeout=60, check=False)

    def status(self) -> int | None:
        return self._end.result() if self._end.done() else None

    async def _wait(self) -> int:
        logs = await asyncio.create_subprocess_exec(
            "docker",
            "logs",
            "--follow",
            self.identity,
            stdout=self._log.file,
            stderr=self._log.file,
        )
        status = int(await _sent("wait", self.identity))
        await logs.wait()
        self._log.is_over = True
        await _sent("rm", self.identity)
        return status


class DockerLauncher:
    """See `Launcher`. Removes what it started when it is closed."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        """`hosts`: addresses by the names of services."""
        self._hosts = hosts
        self._label = f"headwater-test={secrets.token_hex(8)}"

    def close(self) -> None:
        left = (
            _docker("ps", "--all", "--quiet", "--filter", f"label={self._label}")
            .stdout.decode()
            .split()
        )
        if left:
            _docker("rm", "--force", *left)

    async def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        mounts: Mapping[str, Path],
        container: Object,
        within: Running | None = None,
    ) -> Running:
        log = StageLog(name)
        if isinstance(within, DockerContainer):
            process = await asyncio.create_subprocess_exec(
                "docker", "exec", within.identity, *command, stdout=log.file, stderr=log.file
            )
            return ProcessContainer(process, log)
        program, *arguments = command
        identity = await _sent(
            *("run", "--detach", "--label", self._label, "--network", "host", "--user", _user()),
            *(
                flag
                for host, address in self._hosts.items()
                for flag in ("--add-host", f"{host}:{address}")
            ),
            *(flag for each in env.items() for flag in ("--env", "=".join(each))),
            *_security(container["securityContext"]),
            *_volumes(container, mounts),
            *("--entrypoint", program, container["image"], *arguments),
        )
        return DockerContainer(identity, log)


def _security(context: Object) -> list[str]:
    flags = [flag for each in context["capabilities"]["drop"] for flag in ("--cap-drop", each)]
    if context["readOnlyRootFilesystem"]:
        flags.append("--read-only")
    if not context["allowPrivilegeEscalation"]:
        flags += ["--security-opt", "no-new-privileges"]
    return flags


def _volumes(container: Object, mounts: Mapping[str, Path]) -> list[str]:
    flags = []
    for mount in container.get("volumeMounts", []):
        path = mount["mountPath"]
        if path == SHARED_MEMORY:
            flags += ["--shm-size", "1g"]
            continue
        _let_in(mounts[path])
        flags += ["--volume", f"{mounts[path]}:{path}{':ro' if mount.get('readOnly') else ''}"]
    return flags


def _user() -> str:
    """The user of the chart's pods. Only root can give files to its group; others run containers as
    themselves."""
    return f"{CHART_USER}:{CHART_USER}" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"


def _let_in(folder: Path) -> None:
    """Gives a volume to the group of the pods, as `fsGroup` does."""
    if os.getuid() == 0:
        folder.chmod(0o2775)
        for path in [folder, *folder.iterdir()]:
            os.chown(path, -1, CHART_USER, follow_symlinks=False)


async def _sent(*arguments: str) -> str:
    """What docker prints. Raises `RuntimeError` with its words where it fails."""
    process = await asyncio.create_subprocess_exec(
        "docker", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, refusal = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"docker {arguments[0]}: {refusal.decode()}")
    return output.decode().strip()
