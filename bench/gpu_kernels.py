"""Times every kernel on a GPU against what memory and arithmetic allow: a table, then JSON.

`python -m headwater.bench.gpu_kernels [--skip-tests] [--only PART ...]` runs the kernels' GPU tests
first and stops if one fails. Each figure is the median over replays of a CUDA graph whose calls
rotate through copies of their inputs, so that the cache does not help.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout
from headwater.engine_core.platforms.cuda_attention import attention_kernels, given
from headwater.kernels.attention.decode_plan import plan_decode
from headwater.kernels.attention.prefill_attention import prefill_tiles
from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.gemm.gemm import configure_blas, linear
from headwater.kernels.gemm.wide_gemm import tiles_for, wide_gemm
from headwater.kernels.norm.rms_norm import add_rms_norm
from headwater.kernels.norm.silu_mul import silu_mul
from headwater.kernels.sampling.filtered_sample import Filters, filtered_sample
from headwater.kernels.sampling.lm_head_sample import MAX_ROWS, lm_head_sample
from headwater.kernels.sampling.logprobs import logprobs
from headwater.kernels.sampling.sample import Candidates, Draws, sample

from .block_products import block_products
from .byte_layers import byte_layers, room_for_plan
from .byte_products import byte_products
from .development import DevelopmentMissing, check_development
from .edit_cases import edit_call
from .expert_products import expert_products
from .gpu_timing import (
    BYTES_PER_US,
    FLOPS_PER_US,
    Figure,
    copies_for,
    randn,
    timed,
    timed_in_turn,
)
from .int4_products import int4_products
from .latent_attention import latent_attention
from .program import program_name
from .window_attention import window_attention

LINEARS = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
}
LINEARS_8B = {name: size for name, size in LINEARS.items() if name.startswith("8B")}
NARROW_LINEARS = {
    "hidden 576 qkv": (960, 576),
    "hidden 576 o": (576, 576),
    "hidden 576 gate_up": (3072, 576),
    "hidden 576 down": (576, 1536),
    "hidden 576 head": (49_152, 576),
}
CONTEXTS = {
    "16 x 30k": [30_000] * 16,
    "256 x 1k": [1024] * 256,
    "64 x 2k": [2048] * 64,
    "1 x 64k + 63 x 1k": [65_536] + [1024] * 63,
    "1 x 32k": [32_768],
    "1 x 1k": [1024],
}


def linears(batch_sizes: tuple[int, ...]) -> Iterator[Figure]:
    for name, (n, k) in LINEARS.items():
        weights = [randn(n, k) for _ in range(copies_for(2 * n * k))]
        for m in batch_sizes:
            x = randn(m, k)
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            limit = max(2 * (n * k + m * (n + k)) / BYTES_PER_US, 2 * m * n * k / FLOPS_PER_US)
            calls = weights * (2 if len(weights) < 8 else 1)
            ours = timed([partial(linear, x, w, out) for w in calls])
            cublas = timed([partial(torch.mm, x, w.t(), out=out) for w in calls])
            dependent = timed([partial(linear, x, w, out, dependent=True) for w in calls])
            yield Figure(
                "linear",
                f"{name} M={m}",
                ours,
                limit,
                f"cuBLASLt {cublas:.1f}, dependent {dependent:.1f}",
            )


def products() -> Iterator[Figure]:
    """Times our product for many rows beside the library's, then with each of its tiles, as a base
    for choosing among them."""
    for name, (n, k) in (LINEARS | NARROW_LINEARS).items():
        weights = [randn(n, k) for _ in range(copies_for(2 * n * k))]
        for m in (64, 256, 512, 2048, 8192):
            x = randn(m, k)
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            limit = max(2 * (n * k + m * (n + k)) / BYTES_PER_US, 2 * m * n * k / FLOPS_PER_US)
            library = [partial(torch.mm, x, w.t(), out=out) for w in weights]
            ours, cublas = timed_in_turn([partial(wide_gemm, x, w, out) for w in weights], library)
            each = {
                str(tiles): timed(
                    [partial(wide_gemm, x, w, out, tiles) for w in weights], replays=7
                )
                for tiles in tiles_for(weights[0])
            }
            note = f"cuBLASLt {cublas:.1f}; " + ", ".join(
                f"{tiles} {us:.1f}" for tiles, us in each.items()
            )
            yield Figure("product of many rows", f"{name} M={m}", ours, limit, note)


@dataclass(slots=True)
class Sequences:
    """Random caches of one layer of Qwen3-8B (or another head layout) for these lengths, blocks
    shuffled."""

    lengths: list[int]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 64
    shared: int = 0
    """Number of first keys that all sequences have in common."""
    fp8: bool = False

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        blocks = self.num_blocks
        num_bytes = 2 * blocks * self.num_kv_heads * self.block_size * 128 * (1 if self.fp8 else 2)
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        layout = KvLayout(copies_for(num_bytes), self.num_kv_heads, 128, dtype)
        device = torch.device("cuda")
        made = KvBlocks.allocated([layout], blocks, self.block_size, device)
        (layers,) = made.kv_caches
        for layer in layers:
            layer.copy_(randn(*layer.shape))
        return [(layer[0], layer[1]) for layer in layers]

    @property
    def num_blocks(self) -> int:
        shared = self.shared // self.block_size
        return shared + sum(-(-n // self.block_size) - shared for n in self.lengths)

    def tables(self) -> torch.Tensor:
        order = torch.randperm(self.num_blocks).tolist()
        shared = self.shared // self.block_size
        common = order[:shared]
        rest = iter(order[shared:])
        widths = [-(-n // self.block_size) for n in self.lengths]
        table = torch.zeros(len(self.lengths), max(widths), dtype=torch.int32)
        for row, width in enumerate(widths):
            table[row, :width] = torch.tensor(common + [next(rest) for _ in range(width - shared)])
        return table.cuda()

    def scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        scale = torch.full((self.num_kv_heads,), 0.02, device="cuda")
        return (scale, scale) if self.fp8 else (None, None)


def time_decode(sequences: Sequences, *, share: bool = False) -> tuple[float, float]:
    """Microseconds of a layer's attention with its merge, and of the step's plan."""
    rows = len(sequences.lengths)
    caches = sequences.caches()
    table = sequences.tables()
    seq_lens = torch.tensor(sequences.lengths, dtype=torch.int32, device="cuda")
    table_rows = torch.arange(rows, dtype=torch.int32, device="cuda")
    plan = room_for_plan(
        rows, max(sequences.lengths), sequences.num_q_heads, sequences.num_kv_heads
    )
    q = randn(rows, sequences.num_q_heads, 128)
    out = randn(rows, sequences.num_q_heads, 128)
    k_scale, v_scale = sequences.scales()

    where = (seq_lens, table_rows, table, plan, out)

    def make_plan() -> None:
        plan_decode(plan, seq_lens, table_rows, table, sequences.block_size, share=share)

    def layer(k: torch.Tensor, v: torch.Tensor) -> None:
        kernels = attention_kernels(q, k)
        scales = given(k_scale=k_scale, v_scale=v_scale)
        if share:
            kernels.shared(q, k, v, *where, **scales)
        kernels.attend_decodes(q, k, v, *where, **scales)

    make_plan()
    calls = caches * (1 if len(caches) > 4 else 4)
    return timed([partial(layer, *kv) for kv in calls]), timed([make_plan] * 10)


def decodes() -> Iterator[Figure]:
    for name, lengths in CONTEXTS.items():
        for fp8 in (False, True):
            us, plan_us = time_decode(Sequences(lengths, fp8=fp8))
            limit = sum(lengths) * 2 * 8 * 128 * (1 if fp8 else 2) / BYTES_PER_US
            yield Figure(
                "decode attention",
                f"{name}{' fp8' if fp8 else ''}",
                us,
                limit,
                f"plan {plan_us:.1f}",
            )
    for block_size in (16, 128):
        us, _ = time_decode(Sequences(CONTEXTS["64 x 2k"], block_size=block_size))
        yield Figure(
            "decode attention", f"64 x 2k page {block_size}", us, 64 * 2048 * 4096 / BYTES_PER_US
        )
    lengths = [4096 + 96] * 256
    for share in (True, False):
        us, plan_us = time_decode(Sequences(lengths, shared=4096), share=share)
        limit = (4096 + 256 * 96) * 4096 / BYTES_PER_US
        flops_limit = 256 * 4192 * 32 * 128 * 4 / FLOPS_PER_US
        case = f"256 x (4096 + 96) {'shared' if share else 'apart'}"
        yield Figure("shared prefix", case, us, max(limit, flops_limit), f"plan {plan_us:.1f}")


def prefill_flops(count: int, start: int, heads: int = 32) -> float:
    return 4 * 128 * heads * sum(start + i + 1 for i in range(count))


def time_prefill(count: int, start: int = 0, block_size: int = 64) -> float:
    total = start + count
    sequences = Sequences([total], block_size=block_size)
    (k, v), table = sequences.caches()[0], sequences.tables()
    q = randn(count, 32, 128)
    out = randn(count, 32, 128)
    bounds, seq_lens, rows = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, count], [total], [0])
    )
    tiles = prefill_tiles([count], [start], 4, torch.device("cuda"))
    return timed(
        [
            partial(
                attention_kernels(q, k).prefill, q, k, v, bounds, seq_lens, rows, table, tiles, out
            )
        ]
        * 3,
        replays=7,
    )


def prefills() -> Iterator[Figure]:
    for count, start in ((1024, 0), (8192, 0), (32_768, 0), (2048, 30_000)):
        us = time_prefill(count, start)
        flops = prefill_flops(count, start)
        yield Figure(
            "prefill attention",
            f"{count} on {start}",
            us,
            flops / FLOPS_PER_US,
            f"{flops / us / 1e6:.0f} TFLOP/s",
        )


def elementwise() -> Iterator[Figure]:
    for m in (1, 256, 8192):
        pairs = [(randn(m, 4096), randn(m, 4096)) for _ in range(copies_for(m * 4096 * 2))]
        weight = randn(4096)
        normed = randn(m, 4096)
        us = timed(
            [partial(add_rms_norm, x, residual, weight, 1e-6, normed) for x, residual in pairs]
        )
        yield Figure("rms norm + residual", f"4096 M={m}", us, m * 4096 * 8 / BYTES_PER_US)
        halves = [randn(m, 24576) for _ in range(copies_for(m * 24576 * 2))]
        product = randn(m, 12288)
        us = timed([partial(silu_mul, x, product) for x in halves])
        yield Figure("silu mul", f"12288 M={m}", us, m * 12288 * 6 / BYTES_PER_US)
        qkvs = [randn(m, 6144) for _ in range(copies_for(m * 6144 * 2))]
        k_cache, v_cache = (randn(m // 64 + 1, 8, 64, 128) for _ in range(2))
        places = torch.arange(m, dtype=torch.int32, device="cuda")
        angles = torch.randn(8192, 128, device="cuda")
        q = randn(m, 32, 128)
        norm = randn(128)
        rest = (places, places, angles, k_cache, v_cache, q)
        us = timed(
            [partial(qk_norm_rope_store_kv, x, *rest, q_norm=norm, k_norm=norm) for x in qkvs]
        )
        yield Figure("q/k norm, rope, store", f"8B M={m}", us, m * 6144 * 4 / BYTES_PER_US)


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


def run_tests() -> None:
    try:
        check_development("kernels without --skip-tests")
    except DevelopmentMissing as missing:
        sys.exit(f"{program_name()}: {missing}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/kernels",
        "--confcutdir=tests/kernels",
    ]
    if subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir=.", "--import-mode=importlib"], check=False
    ).returncode:
        sys.exit("kernel tests failed: nothing is timed")


PARTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "linears": partial(linears, (1, 8, 16, 32, 64, 128)),
    "products": products,
    "int4": partial(int4_products, LINEARS_8B),
    "experts": expert_products,
    "bytes": partial(byte_products, LINEARS_8B),
    "byte-layers": byte_layers,
    "blocks": partial(block_products, LINEARS_8B),
    "decodes": decodes,
    "prefills": prefills,
    "windows": window_attention,
    "latents": latent_attention,
    "elementwise": elementwise,
    "sampling": sampling,
}


def main() -> None:
    parser = argparse.ArgumentParser(program_name(), description=__doc__)
    parser.add_argument("--skip-tests", action="store_true", help="time without testing first")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS)
    )
    options = parser.parse_args()
    if not options.skip_tests:
        run_tests()
    configure_blas()
    torch.manual_seed(0)
    figures = []
    for part in options.only:
        for figure in PARTS[part]():
            figures.append(figure)
            percent = 100 * figure.limit_us / figure.us
            print(
                f"{figure.kernel:24} {figure.case:28} {figure.us:9.1f} us {percent:5.0f} %  "
                f"{figure.note}",
                flush=True,
            )
        torch.cuda.empty_cache()
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "figures": [asdict(figure) for figure in figures],
            }
        )
    )


if __name__ == "__main__":
    main()
