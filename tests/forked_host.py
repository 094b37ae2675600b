"""Hosts of pipeline stages as processes that are forked from one that has imported torch."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.ranks.rank_devices import SHARE, VISIBLE
from headwater.engine_core.parallel.host_join import JoinRefused
from tests import forked_stage  # noqa: F401 (names what the server of forks imports)
from tests.free_ports import HOST, free_port
from tests.polling import holds_within
from tests.stage_log import StageLog

SECRET = b"a secret of thirty-two bytes or more"
OTHER = b"another secret of thirty-two bytes or more"


class ForkedHost(ForkServerProcess):
    """A host that joins `address`. It is started at once."""

    def __init__(
        self,
        address: str,
        secret_file: Path,
        folder: Path,
        *,
        prepare: Callable[[], None] | None = None,
    ):
        super().__init__(name="stage host")
        self._asked = address, secret_file, folder
        self._prepare = prepare
        self.log = StageLog("the stage host")
        self.start()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"log": None, "_file": DupFd(self.log.file)}

    def run(self) -> None:
        os.dup2(self._file.detach(), sys.stderr.fileno())
        logging.basicConfig(level="INFO", format="%(message)s", force=True)
        stopped, stop = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.write(stop, b"\0"))
        if self._prepare is not None:
            self._prepare()
        from headwater.engine_core.executors.ranks.stage_host import StageHost  # noqa: PLC0415 (as its program does)

        try:
            StageHost(*self._asked, 1, [stopped]).run()
        except (ConfigError, JoinRefused) as error:
            sys.exit(str(error))

    @property
    def rank_pids(self) -> list[int]:
        """In the order of the ranks."""
        return [
            int(pid)
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ]

    def says(self, sentence: str, seconds: float = 60) -> bool:
        return holds_within(lambda: sentence in self.log.text(), seconds)

    def signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> int:
        self.join(seconds)
        assert self.exitcode is not None, "the stage host still runs"
        return self.exitcode

    def descriptors(self) -> list[str]:
        """What its open files are, without their numbers."""
        links = list[str]()
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            # The host may close a descriptor during this loop.
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(path))
        return sorted(re.sub(r"\d+", "", link) for link in links)

    def finish(self) -> None:
        if self.exitcode is None:
            self.kill()
            self.join(10)
        self.log.is_over = True


@contextlib.contextmanager
def forked_host(address: str, secret_file: Path, folder: Path, **more: Any) -> Iterator[ForkedHost]:
    host = ForkedHost(address, secret_file, folder, **more)
    try:
        yield host
    finally:
        host.finish()


def use_gpus(gpus: range, *, shares: bool) -> None:
    """Prepares a host for GPUs of its own, or with `shares` for turns on the first one."""
    if shares:
        os.environ[SHARE] = "1"
    else:
        os.environ[VISIBLE] = ",".join(map(str, gpus))


def write_secret(folder: Path, secret: bytes = SECRET) -> Path:
    path = folder / f"secret-{secret[:4].hex()}"
    path.write_bytes(secret + b"\n")
    path.chmod(0o600)
    return path


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def free_address() -> str:
    return f"{HOST}:{free_port()}"
