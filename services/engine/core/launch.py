"""Starts the process of a core."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from ...runtime.forked import ForkClient, Process
from .variables import CORE_FORKS_FD, WEIGHTS_HOLDER_FD

CORE_MODULE = "headwater.services.engine.core.process"
STANDBY_MODULE = "headwater.kernels.launch.standby"
STDOUT = 1
STDERR = 2


def stand_by(environment: Mapping[str, str], numerics_id: str) -> None:
    """Has the next core's process forked ahead, which opens the GPU and loads the kernels of this
    id. Does nothing unless weights are held: loading them would take far longer than what this
    saves."""
    if WEIGHTS_HOLDER_FD not in os.environ:
        return
    if (forks := ForkClient.inherited(CORE_FORKS_FD)) is not None:
        with forks.socket:
            forks.stand_by(STANDBY_MODULE, [numerics_id], environment=environment)


async def start_core(
    arguments: Sequence[str], *, environment: Mapping[str, str], descriptors: Sequence[int]
) -> Process:
    """Starts the core, which inherits the descriptors: by the server of forks that the supervisor
    names, else in a new interpreter."""
    if (forks := ForkClient.inherited(CORE_FORKS_FD)) is not None:
        with forks.socket:
            files = {number: number for number in (STDOUT, STDERR, *descriptors)}
            forked = await forks.start(CORE_MODULE, arguments, environment=environment, files=files)
        if forked is not None:
            return forked
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        CORE_MODULE,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        env=environment,
        pass_fds=descriptors,
    )
