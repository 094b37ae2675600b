"""`headwater bench attention`: our attention beside libraries' on a GPU, of prompts and of decode,
in turn.

Each takes its turn for half a second, since a GPU that computes without pause is at its limit of
power: a short run gives another figure. Results are compared first, and whether a row's bits depend
on the rest of the batch and on the division of its prompt into chunks, since only an attention
whose bits do not could be on the default path.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer

from headwater.kernels.gemm.gemm import configure_blas, linear, linear_silu_mul

from .attention_cases import HEAD_DIM, KV_HEADS, Batch, Planned, ours
from .attention_lengths import CONTEXTS
from .attention_others import has_flashinfer, others
from .figures import print_table
from .gpu_timing import captured, randn
from .program import run_program

PROMPTS = ((1, 8192, 0), (1, 8192, 8192), (1, 8192, 24_576), (1, 1024, 0), (8, 1024, 0))
"""Chunks (number, tokens of each, tokens cached before each) of O5, O6, O7 and O2."""
DECODES = ("16 x 30k", "64 x 2k", "256 x 1k", "1 x 1k")
HIDDEN = 4096
WIDTH = 12_288
"""Sizes of Qwen3-8B."""
MAX_DIFFERENCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    batch: str
    whose: str
    difference: float
    """Relative difference of the result from ours."""
    ms: float
    of_limit: float
    """Time of matrix units or memory at their ceilings, as a share of the measured time."""
    layer_ms: float | None
    """Milliseconds of a prompt with a layer's products around the attention."""
    plan_us: float | None
    """Microseconds that a step pays once, for all of its layers."""
    same_alone: bool | None
    """Whether the first sequence's rows have the same bits without the others."""
    same_cut: bool | None
    """Whether a prompt's last rows have the same bits as a chunk of their own, of odd size."""


class Layer:
    """The products of a layer around an attention."""

    def __init__(self, tokens: int) -> None:
        sizes = (
            (HIDDEN + 2 * KV_HEADS * HEAD_DIM, HIDDEN),
            (HIDDEN, HIDDEN),
            (2 * WIDTH, HIDDEN),
            (HIDDEN, WIDTH),
        )
        self._qkv, self._o, self._gate_up, self._down = (randn(*size) * 0.02 for size in sizes)
        self._x = randn(tokens, HIDDEN)

    def run(self, attention: Callable[[], torch.Tensor]) -> None:
        linear(self._x, self._qkv)
        linear(attention().reshape(-1, HIDDEN), self._o)
        linear(linear_silu_mul(self._x, self._gate_up), self._down)


def sustained(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds of one call, repeated for `seconds`."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    num_calls = 0
    while time.perf_counter() - began < seconds:
        for _ in range(4):
            call()
        torch.cuda.synchronize()
        num_calls += 4
    return (time.perf_counter() - began) / num_calls * 1e3


def batches() -> Iterator[Batch]:
    for num, tokens, cached in PROMPTS:
        name = f"{f'{num} x ' if num > 1 else ''}{tokens:,} on {cached:,}"
        yield Batch.random(name, [tokens] * num, [cached + tokens] * num)
    for name in DECODES:
        yield Batch.random(name, [1] * len(CONTEXTS[name]), CONTEXTS[name])


def compare(batch: Batch, *, rounds: int, seconds: float) -> Iterator[Measurement]:
    """Measurements of all libraries, ours first. Raises AssertionError where a library's result
    differs."""
    contenders = {"ours": ours(batch), **others(batch)}
    results = {
        whose: planned.attend(*batch.caches[0]).clone() for whose, planned in contenders.items()
    }
    differences = {whose: _difference(result, results["ours"]) for whose, result in results.items()}
    assert max(differences.values()) < MAX_DIFFERENCE, differences

    def part_is_same(whose: str, tokens: int) -> bool:
        part, rows = batch.end_of_first(tokens)
        plan = ours(part) if whose == "ours" else others(part)[whose]
        return torch.equal(plan.attend(*part.caches[0]), results[whose][rows])

    calls = {whose: _layers_of(batch, planned) for whose, planned in contenders.items()}
    layer = None if batch.decodes else Layer(sum(batch.counts))
    graphs = [captured(each) for each in calls.values()]
    if layer is not None:
        graphs += [captured([partial(layer.run, call) for call in each]) for each in calls.values()]
    turns = [[sustained(graph.replay, seconds) for graph in graphs] for _ in range(rounds)]
    medians = [statistics.median(column) / len(batch.caches) for column in zip(*turns, strict=True)]

    for i, (whose, planned) in enumerate(contenders.items()):
        yield Measurement(
            batch=batch.name,
            whose=whose,
            difference=differences[whose],
            ms=round(medians[i], 4),
            of_limit=round(batch.limit_ms / medians[i], 3),
            layer_ms=None if layer is None else round(medians[len(contenders) + i], 3),
            plan_us=None if planned.plan is None else round(_plan_us(planned.plan), 1),
            same_alone=part_is_same(whose, batch.counts[0]) if len(batch.counts) > 1 else None,
            same_cut=None if batch.decodes else part_is_same(whose, batch.counts[0] // 3),
        )


def _difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def _layers_of(batch: Batch, planned: Planned) -> list[Callable[[], torch.Tensor]]:
    return [partial(planned.attend, k, v) for k, v in batch.caches]


def _plan_us(plan: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        plan()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def _cell(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) and value < 0.1 else str(value)


def main(
    rounds: Annotated[int, typer.Option(help="turns of each")] = 3,
    seconds: Annotated[float, typer.Option(help="of a turn")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Compare attention with libraries'."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU here")
    if not has_flashinfer():
        hint = (
            "FlashInfer is not installed: `pip install flashinfer-python`, and CUDA's nvcc, "
            "with which it compiles"
        )
        typer.echo(hint, err=True)
    configure_blas()
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = [
            asdict(each)
            for batch in batches()
            for each in compare(batch, rounds=rounds, seconds=seconds)
        ]
    if not as_json:
        print_table(list(rows[0]), (map(_cell, row.values()) for row in rows))
    typer.echo(json.dumps(rows))


if __name__ == "__main__":
    run_program(main)
