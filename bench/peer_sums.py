"""Times sums over the memory of several GPUs, or over host memory, with the residual add and
RMSNorm after them, beside NCCL's all-reduce.

Each rank is a process with a GPU. Launches are chains of a CUDA graph that all ranks replay; a
figure is the median of the slowest rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import distributed

from headwater.engine_core.executors.ranks.host_exchange import ExchangeSizes, HostExchange
from headwater.engine_core.options import OFF, PEER_ACCESS
from headwater.engine_core.weights.shards import ParallelLayout
from headwater.kernels.peer.peer_memory import OwnMemory, PeerMemory, reaches, slot_bytes_of
from headwater.kernels.peer.peer_sum import GROUP_ROWS, peer_sum, peer_sum_add_rms_norm

from .figures import print_table
from .gpu_timing import randn, timed
from .program import check_choice, run_program

HIDDEN = 4096
ROWS = (1, 8, 64, 512, 8192)
CHAIN = 72
"""Sums of a step of Qwen3-8B."""
MOST_DEPENDENT = 512
"""Rows up to which a step launches kernels before the ones before them have ended."""


@dataclass(frozen=True, slots=True)
class SumFigure:
    """Microseconds of one sum of `num_bytes` on each rank."""

    num_bytes: int
    num_ranks: int
    sum_us: float
    sum_norm_us: float
    """Time of a sum with residual add and norm; launched early for few rows, as in a step."""
    nccl_us: float
    """NCCL's all-reduce alone."""


def main(
    ranks: Annotated[int, typer.Option(help="GPUs")] = 2,
    peer_access: Annotated[str, typer.Option(help="auto, or off: through host memory")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON only, a line as soon as it is known")
    ] = False,
) -> None:
    """Time sums over the memory of several GPUs."""
    check_choice("peer_access", peer_access, PEER_ACCESS, " or ")
    is_host = peer_access == OFF
    figures = []
    with (
        tempfile.TemporaryDirectory(prefix="headwater-ranks-") as folder,
        started_ranks(_rank, ranks, Path(folder), is_host, is_host=is_host) as pipes,
    ):
        for num_rows in ROWS:
            found = [pipe.recv() for pipe in pipes]
            slowest = [round(max(each), 2) for each in zip(*found, strict=True)]
            figures.append(SumFigure(num_rows * HIDDEN * 2, ranks, *slowest))
            if as_json:
                print(json.dumps(asdict(figures[-1])), flush=True)
    if not as_json:
        lines = ((each.num_bytes, each.sum_us, each.sum_norm_us, each.nccl_us) for each in figures)
        print_table(("bytes", "sum µs", "sum + norm µs", "NCCL µs"), lines)
        print(json.dumps([asdict(each) for each in figures]))


@contextmanager
def started_ranks(
    work: Callable[..., None], ranks: int, *given: Any, is_host: bool = False
) -> Iterator[list[Connection]]:
    """Pipes to processes, one a GPU, that run `work(rank, ranks, pipe, *given)`; they first
    exchange handles of their memory, unless it is host memory. Raises `typer.BadParameter` for GPUs
    that are absent, or cannot access one another."""
    if not 2 <= ranks <= torch.cuda.device_count():
        raise typer.BadParameter(
            f"ranks is {ranks}; allowed: 2…{torch.cuda.device_count()}, a GPU each"
        )
    pairs = [
        (one, other) for one in range(ranks) for other in range(ranks) if not reaches(one, other)
    ]
    if pairs and not is_host:
        raise typer.BadParameter(
            f"ranks is {ranks}; allowed: GPUs that reach one another's memory, not {pairs}"
        )
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = []
    for rank in range(ranks):
        pipe, end = context.Pipe()
        processes.append(context.Process(target=work, args=(rank, ranks, end, *given), daemon=True))
        processes[-1].start()
        end.close()
        pipes.append(pipe)
    handles = [] if is_host else [pipe.recv_bytes() for pipe in pipes]
    for pipe in () if is_host else pipes:
        pipe.send(handles)
    yield pipes
    for process in processes:
        process.join()


def _rank(rank: int, size: int, pipe: Connection, folder: Path, is_host: bool) -> None:
    torch.cuda.set_device(rank)
    if is_host:
        memory = _host_memory(rank, size, folder / "exchange")
    else:
        own = OwnMemory(size, slot_bytes_of(GROUP_ROWS * HIDDEN * 2))
        pipe.send_bytes(own.handle())
        memory = own.beside(rank, pipe.recv(), flagged_len=HIDDEN)
    distributed.init_process_group(
        "nccl", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size
    )
    for num_rows in ROWS:
        pipe.send(_times(memory, num_rows))
    distributed.destroy_process_group()


def _host_memory(rank: int, size: int, path: Path) -> PeerMemory:
    """Peer memory over a file, which ranks map as an engine's ranks map memory without a name."""
    sizes = ExchangeSizes(
        layout=ParallelLayout(tensor=size), row_bytes=2 * HIDDEN, stages=None, here=range(1)
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return HostExchange(descriptor, sizes, rank).peers()
    finally:
        os.close(descriptor)


def _times(memory: PeerMemory, num_rows: int) -> list[float]:
    x = randn(num_rows, HIDDEN)
    residual = randn(num_rows, HIDDEN)
    weight = randn(HIDDEN)
    norm = partial(
        peer_sum_add_rms_norm,
        memory,
        x,
        residual,
        weight,
        1e-6,
        dependent=num_rows <= MOST_DEPENDENT,
    )
    calls: list[Callable[[], Any]] = [
        partial(peer_sum, memory, x),
        norm,
        partial(distributed.all_reduce, x),
    ]
    times = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        distributed.barrier()
        times.append(timed([call] * CHAIN, replays=15))
    return times


if __name__ == "__main__":
    run_program(main)
