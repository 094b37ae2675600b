"""A rank of a test of kernels over peer memory: a process that computes what its parent asks for.

Each has a GPU of its own where there are as many, else all share one; they map one another's memory
by IPC handles, or host memory that they share. Without a GPU kernels are interpreted over memory
that the processes share, and the server of forks starts them: to import torch and Triton takes a
new interpreter four seconds of a core (2026-11-26).
"""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch

from headwater.engine_core.executors.device.locked_memory import LockedMemory
from headwater.kernels.peer.peer_memory import (
    OwnMemory,
    PeerMemory,
    host_address,
    in_host_memory,
    memory_bytes,
    new_numbers,
)
from tests import forked_stage  # noqa: F401 (names what the server of forks imports)
from tests.kernels import interpreter

Work = Callable[..., Any]
"""A function of a module, called with the rank's `PeerMemory` and what the parent sends."""
SECONDS = 120
ROOT = Path(__file__).parents[2]


class PeerRanks:
    """Processes of all ranks of a group."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    @property
    def size(self) -> int:
        return len(self._pipes)

    def __call__(self, work: Work, *given: Any) -> list[Any]:
        """What the ranks return, in their order; the i-th of each thing that is given goes to rank
        i."""
        for rank, pipe in enumerate(self._pipes):
            send(pipe, (work, tuple(each[rank] for each in given)))
        return [received(pipe) for pipe in self._pipes]


def send(pipe: Connection, value: Any) -> None:
    """With tensors as bytes, where torch would share memory of its own."""
    pipe.send_bytes(pickle.dumps(value))


def received(pipe: Connection) -> Any:
    assert pipe.poll(SECONDS), "a rank says nothing"
    value = pickle.loads(pipe.recv_bytes())
    assert not isinstance(value, BaseException), value
    return value


@contextmanager
def peer_ranks(size: int, slot_bytes: int, *, is_host: bool = False) -> Iterator[PeerRanks]:
    """`is_host`: they exchange over host memory, as GPUs that do not reach one another's memory
    do."""
    memory = os.memfd_create("peers")
    os.ftruncate(memory, size * memory_bytes(size, slot_bytes))
    pairs = [Pipe() for _ in range(size)]
    pipes, ends = [list(side) for side in zip(*pairs, strict=True)]
    start = started if torch.cuda.is_available() else forked
    processes = start(ends, [slot_bytes, memory, int(is_host)])
    for end in ends:
        end.close()
    try:
        handles = [received(pipe) for pipe in pipes]
        for pipe in pipes:
            send(pipe, handles)
        yield PeerRanks(pipes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(memory)


def started(ends: list[Connection], given: list[int]) -> list[subprocess.Popen[bytes]]:
    """Interpreters of the ranks at these ends: the driver of a GPU does not outlive a fork."""
    module = [sys.executable, "-m", "tests.kernels.peer_rank"]
    files = [end.fileno() for end in ends]
    return [
        subprocess.Popen(
            [*module, *map(str, [rank, len(ends), *given, file])],
            cwd=ROOT,
            pass_fds=(given[1], file),
        )
        for rank, file in enumerate(files)
    ]


def forked(ends: list[Connection], given: list[int]) -> list[ForkedPeer]:
    """Forks of a process that has imported torch and Triton, for the ranks at these ends."""
    return [ForkedPeer(rank, len(ends), *given, end.fileno()) for rank, end in enumerate(ends)]


class ForkedPeer(ForkServerProcess):
    """A rank's process whose kernels are interpreted, with those methods of `subprocess.Popen` that
    are used here."""

    def __init__(
        self, rank: int, size: int, slot_bytes: int, shared: int, is_host: int, end: int
    ) -> None:
        super().__init__(name=f"peer {rank}", daemon=True)
        self._sizes = (rank, size, slot_bytes)
        self._is_host = is_host
        self._numbers = (shared, end)
        self.start()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": [DupFd(number) for number in self._numbers]}

    def run(self) -> None:
        interpreter.mend()
        shared, end = (file.detach() for file in self._files)  # type: ignore[attr-defined]  # set where it is pickled
        main(*self._sizes, shared, self._is_host, end)

    def wait(self) -> None:
        self.join()


def main(rank: int, size: int, slot_bytes: int, shared: int, is_host: int, end: int) -> None:
    pipe = Connection(end)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        whole = torch.frombuffer(mmap.mmap(shared, 0), dtype=torch.uint8)
        memory = interpreted(rank, size, slot_bytes, whole, is_host=bool(is_host))
        send(pipe, b"")
        received(pipe)
    else:
        torch.cuda.set_device(rank if torch.cuda.device_count() >= size else 0)
        if is_host:
            memory = over_host_memory(rank, size, slot_bytes, shared)
            send(pipe, b"")
            received(pipe)
        else:
            own = OwnMemory(size, slot_bytes)
            send(pipe, own.handle())
            memory = own.beside(rank, received(pipe))
    serve(pipe, memory)


def interpreted(
    rank: int, size: int, slot_bytes: int, whole: torch.Tensor, *, is_host: bool
) -> PeerMemory:
    piece = memory_bytes(size, slot_bytes)
    bases = torch.tensor([whole.data_ptr() + i * piece for i in range(size)])
    host = whole if is_host else None
    return PeerMemory(
        index=rank, bases=bases, numbers=new_numbers("cpu"), slot_bytes=slot_bytes, host=host
    )


def over_host_memory(rank: int, size: int, slot_bytes: int, shared: int) -> PeerMemory:
    whole = LockedMemory(torch.frombuffer(mmap.mmap(shared, 0), dtype=torch.uint8))
    address = host_address(whole.memory.data_ptr())
    return in_host_memory(rank, address, memory_bytes(size, slot_bytes), size, slot_bytes, 0, whole)


def serve(pipe: Connection, memory: PeerMemory) -> None:
    while True:
        work, given = pickle.loads(pipe.recv_bytes())
        try:
            send(pipe, work(memory, *given))
        except Exception as error:
            traceback.print_exc()
            send(pipe, error)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
