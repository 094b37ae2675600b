"""Times attention on a GPU over sequences of several lengths against what memory and arithmetic
allow: figures of `gpu_kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout
from headwater.engine_core.platforms.cuda_attention import attention_kernels, given
from headwater.kernels.attention.decode_plan import plan_decode
from headwater.kernels.attention.prefill_attention import prefill_tiles

from .byte_layers import room_for_plan
from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, copies_for, randn, timed

CONTEXTS = {
    "16 x 30k": [30_000] * 16,
    "256 x 1k": [1024] * 256,
    "64 x 2k": [2048] * 64,
    "1 x 64k + 63 x 1k": [65_536] + [1024] * 63,
    "1 x 32k": [32_768],
    "1 x 1k": [1024],
}


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
