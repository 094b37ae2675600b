"""compose.yaml at work: a project with two gateways, two engines, and two of each text stage."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.free_ports import free_port
from tests.polling import holds_within

ROOT = Path(__file__).parents[2]
IMAGES = ("headwater-front:latest", "headwater-engine-cpu:latest", "nats:2", "redis:7")
KEY = "key-of-the-project"
ADMIN_KEY = "administrators-key-of-the-project"
SECONDS_TO_START = 900
TEXT_STAGES = ("processor", "output-processor")
STAGES = {"gateway": 2, "processor": 2, "output_processor": 2, "engine": 2}


def compose_command() -> list[str]:
    """The command that reads compose.yaml here; none where there is none."""
    plugin = ["docker", "compose"]
    known = subprocess.run([*plugin, "version"], capture_output=True, timeout=60, check=False)
    if not known.returncode:
        return plugin
    return [found] if (found := shutil.which("docker-compose")) else []


class ComposeProject:
    """Containers of a project, by the names of their services."""

    def __init__(self) -> None:
        self._name = f"headwater{secrets.token_hex(4)}"
        ports = {
            name: str(free_port())
            for name in ("PORT", "GRPC_PORT", "SECOND_PORT", "SECOND_GRPC_PORT")
        }
        self._env = {
            **os.environ,
            **ports,
            "COMPOSE_PROFILES": "cpu,two-gateways",
            "HEADWATER_KEY": KEY,
            "HEADWATER_ADMIN_KEY": ADMIN_KEY,
        }
        self.gateways = [f"http://127.0.0.1:{ports[name]}" for name in ("PORT", "SECOND_PORT")]

    @contextlib.contextmanager
    def running(self) -> Iterator[ComposeProject]:
        """From images that are there. Leaves no container, network or volume."""
        scales = [word for stage in TEXT_STAGES for word in ("--scale", f"{stage}=2")]
        try:
            self._compose("up", "--no-build", "-d", *scales)
            assert holds_within(self.is_whole, SECONDS_TO_START), self.logs()
            yield self
        finally:
            self._compose("down", "--volumes", "--timeout", "5")

    def container(self, service: str) -> str:
        """Identity of the first container of the service."""
        # Of compose's own labels: its `ps` leaves out containers that have ended, and has a flag
        # against it only in newer releases.
        labels = {
            "com.docker.compose.project": self._name,
            "com.docker.compose.service": service,
        }
        filters = [
            word for item in labels.items() for word in ("--filter", "label=" + "=".join(item))
        ]
        return self._run(["docker", "ps", "--all", "--quiet", *filters]).split()[-1]

    def docker(self, verb: str, service: str) -> None:
        """A verb of docker that takes a container, as `kill`."""
        self._run(["docker", *verb.split(), self.container(service)])

    def tried(self, verb: str, service: str) -> bool:
        """Whether docker did that to the container."""
        command = ["docker", verb, self.container(service)]
        return not subprocess.run(command, capture_output=True, timeout=600, check=False).returncode

    def exit_status(self, service: str) -> int:
        form = "{{.State.ExitCode}}"
        reported = self._run(["docker", "inspect", "--format", form, self.container(service)])
        return int(reported)

    def is_whole(self) -> bool:
        """Whether each gateway sees all stages, and each of them serves."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        try:
            for gateway in self.gateways:
                seen = httpx.get(f"{gateway}/console/live?once=1", headers=headers).json()
                rows = [*seen["replicas"], *seen["stages"]]
                kinds = Counter(row.get("kind", "engine") for row in rows)
                if kinds != STAGES or {row["state"] for row in rows} != {"serving"}:
                    return False
        except httpx.HTTPError:
            return False
        return True

    def logs(self) -> str:
        return self._compose("logs", "--no-color", "--tail=40")

    def _compose(self, *words: str) -> str:
        return self._run([*compose_command(), "--project-name", self._name, *words])

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=ROOT,
            env=self._env,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout
