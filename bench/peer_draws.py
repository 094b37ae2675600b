"""Times filtered draws and log probabilities where each of several GPUs has the logits of some
tokens: with all logits gathered on every GPU, and without.

Each rank is a process with a GPU. Launches are chains of a CUDA graph that all ranks replay; a
figure is the median of the slowest rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated

import torch
import typer

from headwater.engine_core.platforms.peer_group import LEAST_SLOT, PeerGroup
from headwater.kernels.peer.peer_memory import OwnMemory
from headwater.kernels.sampling.filtered_sample import Filters, filtered_sample
from headwater.kernels.sampling.logprobs import logprobs_of
from headwater.kernels.sampling.sample import Candidates, best_of_stretches, sample

from .gpu_timing import randn, timed
from .peer_sums import started_ranks
from .program import run_program
from .sampling_cases import draws_of

VOCAB_SIZE = 151_936
ROWS = (1, 64, 256)
FILTERS = {
    "top-k 20, top-p 0.95": (20, 0.95, 0.0),
    "top-p 0.9": (0, 0.9, 0.0),
    "min-p 0.05": (0, 1.0, 0.05),
}
SCORES = "log probabilities, 5 likeliest"
CHAIN = 4


@dataclass(frozen=True, slots=True)
class DrawFigure:
    """Microseconds of one draw of `num_rows` rows on each rank."""

    draw: str
    num_rows: int
    num_ranks: int
    gathered_us: float
    divided_us: float


def main(ranks: Annotated[int, typer.Option(help="GPUs")] = 2) -> None:
    """Time filtered draws over the logits of several GPUs, gathered and not; prints each result as
    a line of JSON at once."""
    with started_ranks(_rank, ranks) as pipes:
        for draw in (*FILTERS, SCORES):
            for num_rows in ROWS:
                found = [pipe.recv() for pipe in pipes]
                gathered, divided = (round(max(each), 1) for each in zip(*found, strict=True))
                print(
                    json.dumps(asdict(DrawFigure(draw, num_rows, ranks, gathered, divided))),
                    flush=True,
                )


def _rank(rank: int, size: int, pipe: Connection) -> None:
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    own = OwnMemory(size, LEAST_SLOT)
    pipe.send_bytes(own.handle())
    group = PeerGroup(own.beside(rank, pipe.recv()))
    for draw in (*FILTERS, SCORES):
        for num_rows in ROWS:
            gathered, divided = (
                _scored(group, num_rows)
                if draw == SCORES
                else _drawn(group, num_rows, FILTERS[draw])
            )
            pipe.send([_time(group, gathered), _time(group, divided)])


def _time(group: PeerGroup, call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    # Returns when all ranks are here.
    group.join(torch.zeros(1, 1, device="cuda")).cpu()
    return timed([call] * CHAIN, replays=15)


def _drawn(
    group: PeerGroup, num_rows: int, asked: tuple[int, float, float]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One draw with all logits gathered, and one without."""
    width = VOCAB_SIZE // group.size
    logits = randn(num_rows, width) * 3
    draws = draws_of(num_rows)
    top_ks, top_ps, min_ps = (torch.full((num_rows,), each, device="cuda") for each in asked)
    filters = Filters(top_ks=top_ks.int(), top_ps=top_ps, min_ps=min_ps)
    candidates = Candidates.allocate(num_rows, VOCAB_SIZE, logits.device)
    out = torch.empty_like(draws.choice_indices)
    part = group.slice_of(group.index * width, VOCAB_SIZE)

    def gathered() -> None:
        whole = group.join(logits)
        sample(whole, draws, candidates, out)
        filtered_sample(whole, draws, filters, out)

    def divided() -> None:
        group.best(candidates, best_of_stretches(logits, draws, candidates, part.first_token), out)
        filtered_sample(logits, draws, filters, out, part)

    return gathered, divided


def _scored(group: PeerGroup, num_rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
    width = VOCAB_SIZE // group.size
    logits = randn(num_rows, width) * 3
    ids = torch.arange(num_rows, dtype=torch.int32, device="cuda") * 500
    part = group.slice_of(group.index * width, VOCAB_SIZE)
    return lambda: logprobs_of(group.join(logits), ids, 5), partial(
        logprobs_of, logits, ids, 5, part
    )


if __name__ == "__main__":
    run_program(main)
