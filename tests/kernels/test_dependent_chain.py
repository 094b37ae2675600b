"""A chain of layers whose kernels all start early, many times: each result has the bits of kernels that run apart."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

from headwater.kernels.decode_attention import decode_attention
from headwater.kernels.decode_plan import DecodePlan, plan_decode
from headwater.kernels.gemm import configure_blas, linear
from headwater.kernels.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.reduce_splits import reduce_splits
from headwater.kernels.rms_norm import add_rms_norm
from headwater.kernels.silu_mul import silu_mul

pytestmark = pytest.mark.gpu

HIDDEN, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE = 576, 9, 3, 64, 1536
NUM_LAYERS, NUM_ROWS, BLOCK_SIZE, NUM_REPLAYS = 6, 32, 64, 300
LENGTHS = [1, 5, 12, 9, 14, 107, 201, 460, 6, 5, 8, 300, 12, 30, 31, 45, 66, 510, 384, 128, 129, 64, 65, 2]
POISON = 7.0


@dataclass(slots=True)
class Layer:
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


@dataclass(slots=True)
class Results:
    """Outputs of a layer's kernels, each in a tensor of its own."""

    qkv: torch.Tensor
    q: torch.Tensor
    attention: torch.Tensor
    o: torch.Tensor
    normed: torch.Tensor
    gate_up: torch.Tensor
    activated: torch.Tensor
    down: torch.Tensor
    out: torch.Tensor


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def layer() -> Layer:
    qkv_size, cache = (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, (100, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    weights = (randn(n, k) * 0.05 for n, k in ((qkv_size, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN)))
    return Layer(*weights, randn(HIDDEN, INTERMEDIATE) * 0.05, randn(HIDDEN), randn(*cache), randn(*cache))


def results() -> Results:
    widths = {
        "qkv": (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM,
        "gate_up": 2 * INTERMEDIATE,
        "activated": INTERMEDIATE,
    }
    shapes = {field.name: (NUM_ROWS, widths.get(field.name, HIDDEN)) for field in fields(Results)}
    heads = dict.fromkeys(("q", "attention"), (NUM_ROWS, NUM_Q_HEADS, HEAD_DIM))
    return Results(**{name: randn(*shape) for name, shape in (shapes | heads).items()})


class Chain:
    """Decode steps of a few layers over one set of sequences."""

    def __init__(self) -> None:
        configure_blas()
        device = torch.device("cuda")
        lengths = LENGTHS + [0] * (NUM_ROWS - len(LENGTHS))
        widths = [-(-length // BLOCK_SIZE) for length in lengths]
        table = torch.zeros(NUM_ROWS, 64, dtype=torch.int32)
        for row, width in enumerate(widths):
            table[row, :width] = torch.arange(sum(widths[:row]), sum(widths[: row + 1])) + 1
        self.table, self.rows = table.to(device), torch.arange(NUM_ROWS, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.positions = (self.seq_lens - 1).clamp(min=0)
        blocks = self.table.gather(1, (self.positions // BLOCK_SIZE)[:, None].long())[:, 0]
        slots = blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.slots = torch.where(self.seq_lens > 0, slots, -1).int()
        self.plan = DecodePlan.allocate(
            max_rows=64,
            max_seq_len=4096,
            num_q_heads=NUM_Q_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            device=device,
        )
        self.cos_sin, self.x = torch.randn(4096, HEAD_DIM, device=device), randn(NUM_ROWS, HIDDEN)
        self.layers = [layer() for _ in range(NUM_LAYERS)]

    def launch(self, places: list[Results], residual: torch.Tensor, *, dependent: bool) -> None:
        x, early = self.x, {"dependent": dependent}
        plan_decode(self.plan, self.seq_lens, self.rows, self.table, BLOCK_SIZE, share=False)
        for own, at in zip(self.layers, places, strict=True):
            linear(x, own.qkv, at.qkv, **early)
            cache = own.k_cache, own.v_cache
            qk_norm_rope_store_kv(at.qkv, self.positions, self.slots, self.cos_sin, *cache, at.q, **early)
            where = self.seq_lens, self.rows, self.table, self.plan, at.attention
            if decode_attention(at.q, *cache, *where, **early):
                reduce_splits(self.seq_lens, self.plan, at.attention, **early)
            linear(at.attention.flatten(1), own.o, at.o, **early)
            add_rms_norm(at.o, residual, own.norm, 1e-5, at.normed, **early)
            linear(at.normed, own.gate_up, at.gate_up, **early)
            silu_mul(at.gate_up, at.activated, **early)
            linear(at.activated, own.down, at.down, **early)
            add_rms_norm(at.down, residual, own.norm, 1e-5, at.out, **early)
            x = at.out


def test_a_kernel_that_starts_early_changes_nothing_that_an_earlier_one_computes() -> None:
    torch.manual_seed(0)
    chain, first = Chain(), randn(NUM_ROWS, HIDDEN)
    expected, found = ([results() for _ in range(NUM_LAYERS)] for _ in range(2))
    chain.launch(expected, first.clone(), dependent=False)
    residual = first.clone()
    chain.launch(found, residual, dependent=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.launch(found, residual, dependent=True)
    for replay in range(NUM_REPLAYS):
        residual.copy_(first)
        for places in found:
            for field in fields(Results):
                getattr(places, field.name).fill_(POISON)
        graph.replay()
        for i, (own, others) in enumerate(zip(found, expected, strict=True)):
            for field in fields(Results):
                got, want = (getattr(places, field.name)[: len(LENGTHS)] for places in (own, others))
                assert torch.equal(got, want), f"{field.name} of layer {i} in replay {replay}"
