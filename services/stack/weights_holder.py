"""The process that holds the weights of one engine on its GPU while the engine is started again. It
begins before the engine; one that died begins again, with nothing held, with the engine's next
life."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from dataclasses import replace

from ..engine.core.variables import WEIGHTS_HOLDER_FD
from ..runtime.forked import ForkClient, Process
from ..runtime.hardware import resolve_device
from .settings import StackSettings
from .stage_process import StageProgram

MODULE = "headwater.engine_core.system.memory_holder"


def holds_weights(settings: StackSettings) -> bool:
    """Whether engines find the weights of their last life on their GPU."""
    is_one_gpu = settings.num_ranks == 1 and resolve_device(settings.device) == "cuda"
    return settings.hold_weights == "auto" and is_one_gpu and settings.executor == "single"


class WeightsHolder:
    def __init__(self, forks: ForkClient | None) -> None:
        self._forks = forks
        self._requests: socket.socket | None = None
        self._process: Process | None = None
        self._end: asyncio.Task[int] | None = None
        """Waits for the end of the process."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def ended(self) -> None:
        """Returns when the process has ended, or where there is none."""
        if self._end is not None:
            await asyncio.shield(self._end)

    async def known_to(self, engine: StageProgram) -> StageProgram:
        """The engine's program with the descriptor at which its core asks for weights."""
        if self._requests is None or self._end is None or self._end.done():
            await self.stop()
            self._requests = await self._start(engine)
        number = self._requests.fileno()
        env = {**engine.env, WEIGHTS_HOLDER_FD: str(number)}
        return replace(engine, env=env, files=(*engine.files, number))

    async def stop(self) -> None:
        """Ends the process, which gives the memory back."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.ended()

    async def _start(self, engine: StageProgram) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            with theirs:
                self._process = await self._started(engine, theirs.fileno())
            self._end = asyncio.ensure_future(self._process.wait())
            undo.pop_all()
        return ours

    async def _started(self, engine: StageProgram, requests: int) -> Process:
        if self._forks is not None:
            forked = await self._forks.start(
                MODULE, [str(requests)], environment=engine.env, files={requests: requests}
            )
            if forked is not None:
                return forked
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, str(requests)),
            stdin=asyncio.subprocess.DEVNULL,
            env=dict(engine.env),
            pass_fds=[requests],
            # A terminal's Ctrl-C reaches the supervisor alone.
            process_group=0,
        )
