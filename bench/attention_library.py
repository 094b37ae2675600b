"""`headwater bench attention`: prefill attention beside the library's on a GPU, alone and in a layer, in turn.

The library is cuDNN through torch, which needs whole keys in one piece: they are gathered from the blocks, and a chunk
on a cached prefix is two calls whose results are merged. Each takes its turn for half a second, since a GPU that
computes without pause is at its limit of power: what a short run shows is another figure.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headwater.bench.gpu_kernels import Sequences, prefill_flops, randn
from headwater.bench.program import run_program
from headwater.kernels.gemm import configure_blas, linear, linear_silu_mul
from headwater.kernels.prefill_attention import prefill_attention, prefill_tiles

CASES = ((8192, 0), (8192, 8192), (8192, 24_576), (1024, 0))
"""(tokens of the chunk, tokens cached before it) of O5, O6 and O7."""
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH = 32, 8, 128, 4096, 12_288
"""Of Qwen3-8B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Milliseconds; TFLOP/s of attention alone."""

    tokens: int
    cached: int
    difference: float
    """Of the two results, relative."""
    ours_ms: float
    library_ms: float
    layer_ours_ms: float
    layer_library_ms: float
    ours_tflops: float
    library_tflops: float


class Chunk:
    """One chunk of a prompt on its cached prefix, in shuffled blocks of one layer."""

    def __init__(self, tokens: int, cached: int) -> None:
        self.tokens, self.cached = tokens, cached
        sequences = Sequences([cached + tokens])
        self._k, self._v = sequences.caches()[0]
        self._table = sequences.tables()
        self._q, self._out = randn(tokens, HEADS, HEAD_DIM), randn(tokens, HEADS, HEAD_DIM)
        self._bounds, self._lens, self._rows = (
            torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, tokens], [cached + tokens], [0])
        )
        self._tiles = prefill_tiles([tokens], [cached], HEADS // KV_HEADS, self._q.device)

    def ours(self) -> torch.Tensor:
        where = self._bounds, self._lens, self._rows, self._table
        prefill_attention(self._q, self._k, self._v, *where, self._tiles, self._out)
        return self._out

    def library(self) -> torch.Tensor:
        q, k, v = self._q.transpose(0, 1)[None], self._gathered(self._k), self._gathered(self._v)
        if not self.cached:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        before = cudnn(q, k[:, :, : self.cached], v[:, :, : self.cached], None, True, 0.0, False, False)
        own = cudnn(q, k[:, :, self.cached :], v[:, :, self.cached :], None, True, 0.0, True, False)
        # Weights of the two by their sums of exponentials, whose logarithms the library gives.
        share = torch.sigmoid(before[1] - own[1]).to(q.dtype).view(1, HEADS, self.tokens, 1)
        return torch.lerp(own[0], before[0], share)[0].transpose(0, 1)

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        return cache[self._table[0].long()].transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_DIM)


class Layer:
    """The products of a layer around an attention."""

    def __init__(self, tokens: int) -> None:
        sizes = ((HIDDEN + 2 * KV_HEADS * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        self._qkv, self._o, self._gate_up, self._down = (randn(*size) * 0.02 for size in sizes)
        self._x = randn(tokens, HIDDEN)

    def run(self, attention: Callable[[], torch.Tensor]) -> None:
        linear(self._x, self._qkv)
        linear(attention().reshape(-1, HIDDEN), self._o)
        linear(linear_silu_mul(self._x, self._gate_up), self._down)


def sustained(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds of one call while nothing else happens for so long."""
    call()
    torch.cuda.synchronize()
    began, num_calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
        num_calls += 8
    return (time.perf_counter() - began) / num_calls * 1e3


def compare(tokens: int, cached: int, *, rounds: int, seconds: float) -> Comparison:
    chunk, layer = Chunk(tokens, cached), Layer(tokens)
    ours, library = chunk.ours().float(), chunk.library().float()
    calls: list[Callable[[], object]] = [chunk.ours, chunk.library]
    calls += [lambda: layer.run(chunk.ours), lambda: layer.run(chunk.library)]
    times = [[sustained(call, seconds) for call in calls] for _ in range(rounds)]
    medians = [round(statistics.median(column), 3) for column in zip(*times, strict=True)]
    flops = prefill_flops(tokens, cached)
    return Comparison(
        tokens=tokens,
        cached=cached,
        difference=float((ours - library).norm() / library.norm()),
        ours_ms=medians[0],
        library_ms=medians[1],
        layer_ours_ms=medians[2],
        layer_library_ms=medians[3],
        ours_tflops=round(flops / medians[0] / 1e9, 1),
        library_tflops=round(flops / medians[1] / 1e9, 1),
    )


def main(
    rounds: Annotated[int, typer.Option(help="turns of each")] = 3,
    seconds: Annotated[float, typer.Option(help="of a turn")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Compare prefill attention with the library's."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU here")
    configure_blas()
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = [asdict(compare(tokens, cached, rounds=rounds, seconds=seconds)) for tokens, cached in CASES]
    if not as_json:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(
                *(f"{value:.2g}" if isinstance(value, float) and value < 0.1 else str(value) for value in row.values())
            )
        Console().print(table)
    typer.echo(json.dumps(rows))


if __name__ == "__main__":
    run_program(main)
