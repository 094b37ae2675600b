"""Times layers of Qwen3-8B one after another, weights and tokens of eight bits, with the kernels of
a decode step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from headwater.engine_core.platforms.cuda_attention import attention_kernels
from headwater.kernels.attention.decode_plan import DecodePlan, plan_decode
from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.gemm.w8a8 import W8A8Weight, w8a8_linear
from headwater.kernels.norm.rms_norm import rounded_add_rms_norm
from headwater.kernels.norm.silu_mul import rounded_mul
from headwater.kernels.quant.token_rounding import Rounding

from .gpu_timing import BYTES_PER_US, Figure, randn, timed

HIDDEN = 4096
HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
INTERMEDIATE = 12288
NUM_LAYERS = 4
"""Layers of a chain: their weights overflow the cache."""
BLOCK_SIZE = 64
EPS = 1e-6


def random_weight(rounding: Rounding, n: int, k: int) -> W8A8Weight:
    values = torch.randn(n, k, device="cuda") * (30 if rounding.dtype == torch.int8 else 1)
    shape = (-(-n // 64), k // rounding.group) if rounding.group else (n,)
    return W8A8Weight(
        values=values.clamp(-127, 127).to(rounding.dtype),
        scales=torch.rand(shape, device="cuda") * k**-0.5,
    )


def room_for_plan(
    num_rows: int, longest: int, num_heads: int = HEADS, num_kv_heads: int = KV_HEADS
) -> DecodePlan:
    """Room on the GPU for a plan of rows that have up to `longest` keys."""
    return DecodePlan.allocate(
        max_rows=num_rows,
        max_seq_len=longest,
        num_q_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        device=torch.device("cuda"),
    )


@dataclass(slots=True)
class Step:
    """Inputs that all layers of a decode step share: rows that have `num_keys` keys each."""

    residual: torch.Tensor
    x: torch.Tensor
    norm: torch.Tensor
    head_norm: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cos_sin: torch.Tensor
    seq_lens: torch.Tensor
    table_rows: torch.Tensor
    tables: torch.Tensor
    plan: DecodePlan

    @classmethod
    def of(cls, num_rows: int, num_keys: int) -> Step:
        blocks = -(-num_keys // BLOCK_SIZE)
        tables = torch.arange(num_rows * blocks, dtype=torch.int32, device="cuda").view(
            num_rows, blocks
        )
        last = num_keys - 1
        plan = room_for_plan(num_rows, num_keys)
        step = cls(
            residual=randn(num_rows, HIDDEN),
            x=randn(num_rows, HIDDEN),
            norm=torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16),
            head_norm=torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16),
            positions=torch.full((num_rows,), last, dtype=torch.int32, device="cuda"),
            slots=tables[:, -1] * BLOCK_SIZE + last % BLOCK_SIZE,
            cos_sin=torch.rand(num_keys, HEAD_DIM, device="cuda"),
            seq_lens=torch.full((num_rows,), num_keys, dtype=torch.int32, device="cuda"),
            table_rows=torch.arange(num_rows, dtype=torch.int32, device="cuda"),
            tables=tables,
            plan=plan,
        )
        if not plan.is_direct:
            plan_decode(plan, step.seq_lens, step.table_rows, tables, BLOCK_SIZE, share=False)
        return step


@dataclass(slots=True)
class Layer:
    qkv: W8A8Weight
    o: W8A8Weight
    gate_up: W8A8Weight
    down: W8A8Weight
    cache: torch.Tensor

    @classmethod
    def random(cls, rounding: Rounding, num_blocks: int) -> Layer:
        weight = partial(random_weight, rounding)
        return cls(
            weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            weight(HIDDEN, HEADS * HEAD_DIM),
            weight(2 * INTERMEDIATE, HIDDEN),
            weight(HIDDEN, INTERMEDIATE),
            randn(2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM),
        )

    @property
    def num_bytes(self) -> int:
        return sum(each.values.nbytes for each in (self.qkv, self.o, self.gate_up, self.down))


def run(layer: Layer, step: Step) -> None:
    """A layer, from the sum of its input and the residual to its output in step.x."""
    product = partial(w8a8_linear, dependent=True)
    rounding = layer.qkv.rounding
    normed = rounded_add_rms_norm(step.x, step.residual, step.norm, EPS, rounding, dependent=True)
    heads = attend(product(normed, layer.qkv), layer, step)
    x = product(heads, layer.o)
    normed = rounded_add_rms_norm(x, step.residual, step.norm, EPS, rounding, dependent=True)
    gated = rounded_mul(product(normed, layer.gate_up), rounding, is_gelu=False, dependent=True)
    step.x = product(gated, layer.down)


def attend(qkv: torch.Tensor, layer: Layer, step: Step) -> torch.Tensor:
    """qkv [R, (Hq + 2 Hk) D] → [R, Hq D]"""
    q = qkv.new_empty(len(qkv), HEADS, HEAD_DIM)
    k_cache = layer.cache[0]
    v_cache = layer.cache[1]
    qk_norm_rope_store_kv(
        qkv,
        step.positions,
        step.slots,
        step.cos_sin,
        k_cache,
        v_cache,
        q,
        q_norm=step.head_norm,
        k_norm=step.head_norm,
        eps=EPS,
        dependent=True,
    )
    out = torch.empty_like(q)
    where = step.seq_lens, step.table_rows, step.tables, step.plan, out
    kernels = attention_kernels(q, k_cache)
    kernels.attend_decodes(q, k_cache, v_cache, *where, dependent=True)
    return out.flatten(1)


def calls_of(rounding: Rounding, num_rows: int, num_keys: int) -> tuple[list[partial[None]], int]:
    """A chain of layers, and the bytes of weights of one."""
    step = Step.of(num_rows, num_keys)
    layers = [Layer.random(rounding, step.tables.numel()) for _ in range(NUM_LAYERS)]
    return [partial(run, layer, step) for layer in layers * 2], layers[0].num_bytes


def byte_layers() -> Iterator[Figure]:
    """Times layers for one row and a few; the least is the time in which memory gives the
    weights."""
    kinds = {
        "e4m3": Rounding(torch.float8_e4m3fn),
        "e4m3 in blocks": Rounding(torch.float8_e4m3fn, 128),
        "int8": Rounding(torch.int8),
    }
    for name, rounding in kinds.items():
        for num_rows in (1, 8, 16):
            calls, num_bytes = calls_of(rounding, num_rows, 300)
            yield Figure(
                "layer of 8B", f"{name} M={num_rows}", timed(calls), num_bytes / BYTES_PER_US
            )
