"""Times draws, filters, edits and log probabilities on a GPU against what memory and arithmetic
allow: figures of `gpu_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from headwater.kernels.gemm.gemm import linear
from headwater.kernels.sampling.filtered_sample import Filters, filtered_sample
from headwater.kernels.sampling.lm_head_sample import MAX_ROWS, lm_head_sample
from headwater.kernels.sampling.logprobs import logprobs
from headwater.kernels.sampling.sample import Candidates, Draws, sample

from .edit_cases import edit_call
from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, randn, timed


def draws_of(rows: int) -> Draws:
    counters = torch.arange(rows, dtype=torch.int32, device="cuda")
    return Draws(
        temperatures=torch.full((rows,), 0.6, device="cuda"),
        seeds=counters.long(),
        choice_indices=torch.zeros_like(counters),
        output_indices=counters,
    )


def time_filter(logits: torch.Tensor, draws: Draws, top_k: int, top_p: float) -> float:
    rows = len(logits)
    filters = Filters(
        top_ks=torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
        top_ps=torch.full((rows,), top_p, device="cuda"),
        min_ps=torch.zeros(rows, device="cuda"),
    )
    out = torch.empty(rows, dtype=torch.int32, device="cuda")
    return timed([partial(filtered_sample, logits, draws, filters, out)] * 2)


def sampling(vocab: int = 151_936, hidden: int = 4096) -> Iterator[Figure]:
    head = randn(vocab, hidden) * 0.02
    for rows in (1, 16, 64, 256):
        x = randn(rows, hidden)
        logits = randn(rows, vocab)
        draws = draws_of(rows)
        out = torch.empty(rows, dtype=torch.int32, device="cuda")
        candidates = Candidates.allocate(rows, vocab, head.device)
        limit = max(2 * vocab * hidden / BYTES_PER_US, 2 * rows * vocab * hidden / FLOPS_PER_US)
        if rows <= MAX_ROWS:
            us = timed([partial(lm_head_sample, x, head, draws, candidates, out)] * 3)
            yield Figure("head and draw, fused", f"8B M={rows}", us, limit)
        separate: list[Callable[[], object]] = [
            partial(linear, x, head, logits),
            partial(sample, logits, draws, candidates, out),
        ]
        yield Figure("head, then draw", f"8B M={rows}", 2 * timed(separate * 3), limit)
        logits = randn(rows, vocab) * 3
        one_pass = rows * vocab * 2 / BYTES_PER_US
        yield Figure(
            "draw",
            f"M={rows}",
            timed([partial(sample, logits, draws, candidates, out)] * 3),
            one_pass,
        )
        for name, (top_k, top_p) in {
            "top-k 50": (50, 1.0),
            "top-p 0.9": (0, 0.9),
            "both": (50, 0.9),
        }.items():
            yield Figure(
                "filtered draw",
                f"{name} M={rows}",
                time_filter(logits, draws, top_k, top_p),
                one_pass,
            )
        num_tops, top_ids = (
            torch.full(shape, 5, dtype=torch.int32, device="cuda") for shape in ((rows,), (rows, 5))
        )
        call = partial(
            logprobs,
            logits,
            out,
            num_tops,
            torch.empty(rows, device="cuda"),
            top_ids,
            top_ids.float(),
        )
        yield Figure("logprobs, 5 likeliest", f"M={rows}", timed([call] * 2), one_pass)
        for num_outputs in (100, 8000):
            us = timed([edit_call(logits, num_outputs)] * 2)
            yield Figure("edits", f"{num_outputs} outputs M={rows}", us, one_pass)
