"""The core of an engine that tests start, forked from its server: a new interpreter takes seconds
to import torch.

A server that is a `ForkedStage` has inherited the libraries, and has no thread yet when it starts
its core. Threads and environment that libraries read when they are imported are those of the tests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from headwater.engine_core.executors.ranks import multi
from headwater.engine_core.parallel import host_link
from headwater.services.engine.core import launch
from headwater.services.engine.core import process as core_process
from tests.forked_child import ForkedChild, become

LEAST_SILENCE = 6.0
"""Seconds in which ranks may compute no plan. One that waits for a core does not hang."""
STARTING_SILENCE = 60.0
"""The same of another host before the first plan: it may have to compile every kernel."""


async def start_forked_core(
    arguments: Sequence[str], *, environment: Mapping[str, str], descriptors: Sequence[int]
) -> ForkedChild:
    """In place of `core.launch.start_core`."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the server's other threads"
    if (pid := os.fork()) == 0:
        multi.LEAST_SILENCE = LEAST_SILENCE
        host_link.STARTING_SILENCE = STARTING_SILENCE
        argv = [core_process.__file__, *arguments]
        become(core_process.main, argv, environment=environment, descriptors=descriptors)
    return ForkedChild(pid)


def install() -> None:
    """For the engine whose server this process is about to be."""
    launch.start_core = start_forked_core
