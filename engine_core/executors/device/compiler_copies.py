"""Processes beside an engine that compile the kernels of its first start on a machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from headwater.kernels.launch.compile_ahead import MAX_THREADS
from headwater.kernels.launch.compiler_processes import CompilerProcesses, compiler
from headwater.kernels.launch.kernel_list import KernelList

from ...parallel.copied_process import CopiedProcess
from ...system.usable_cores import usable_cores


@contextmanager
def compiler_processes(name: str, *, is_alone: bool) -> Iterator[CompilerProcesses]:
    """Copies of this process that compile for its GPU inside the `with` block; none where an
    earlier engine has listed kernels under this name, or, unless it `is_alone`, other ranks compile
    too. To be entered before this process has begun threads that import or compute: a copy has
    their locks, and not the threads."""
    is_first = is_alone and KernelList(name).is_empty
    num_processes = min(usable_cores(), MAX_THREADS) if is_first else 0
    with ExitStack() as copies, ExitStack() as requests:
        ends = []
        for _ in range(num_processes):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # A copy ends when this end is closed.
            ends.append(requests.enter_context(ours))
            with theirs:
                copies.callback(CopiedProcess(compiler(theirs), {theirs.fileno()}).wait)
        yield CompilerProcesses(ends)
