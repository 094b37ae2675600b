"""A chain of layers whose kernels all start early, many times: each result has the bits of kernels
that run apart."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from headwater.engine_core.platforms.cuda_attention import attention_kernels
from headwater.kernels.attention.decode_plan import DecodePlan, plan_decode
from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.gemm import packed_tiles
from headwater.kernels.gemm.gemm import configure_blas, linear
from headwater.kernels.gemm.hopper_packed_gemm import hopper_packed_gemm
from headwater.kernels.gemm.packed_words import PackedWords
from headwater.kernels.norm.rms_norm import add_rms_norm
from headwater.kernels.norm.silu_mul import silu_mul

pytestmark = pytest.mark.gpu

HEAD_DIM = 64
INTERMEDIATE = 1536
NUM_LAYERS = 6
BLOCK_SIZE = 64
NUM_REPLAYS = 300
LENGTHS = [
    1,
    5,
    12,
    9,
    14,
    107,
    201,
    460,
    6,
    5,
    8,
    300,
    12,
    30,
    31,
    45,
    66,
    384,
    128,
    129,
    64,
    65,
    2,
    510,
]
POISON = 7.0


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    num_rows: int
    packed: bool = False
    """Whether weights have four bits: their products fill rings before the kernel before has inputs
    of its own."""

    @property
    def qkv(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * HEAD_DIM


SIZES = [Sizes(576, 9, 3, 32), Sizes(640, 10, 5, 8, packed=True), Sizes(640, 10, 5, 1, packed=True)]


@dataclass(slots=True)
class Layer:
    qkv: torch.Tensor | PackedWords
    o: torch.Tensor | PackedWords
    gate_up: torch.Tensor | PackedWords
    down: torch.Tensor | PackedWords
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


def weight(n: int, k: int, packed: bool) -> torch.Tensor | PackedWords:
    if not packed:
        return randn(n, k) * 0.05
    words = torch.randint(-(1 << 31), 1 << 31, (n, k // 8), device="cuda").int()
    scales = (torch.rand(k // 128, n, device="cuda") * 0.01).half()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda")
    return PackedWords(words=words, scales=scales, zeros=zeros, bits=4)


def product(
    x: torch.Tensor, weight: torch.Tensor | PackedWords, out: torch.Tensor, *, dependent: bool
) -> None:
    if isinstance(weight, PackedWords):
        tiles = packed_tiles.choose(len(x), *weight.shape, weight.bits)
        assert tiles is not None
        hopper_packed_gemm(x, weight, out, tiles, dependent=dependent)
    else:
        linear(x, weight, out, dependent=dependent)


def layer(sizes: Sizes) -> Layer:
    heads = sizes.num_q_heads * HEAD_DIM
    cache = (100, sizes.num_kv_heads, BLOCK_SIZE, HEAD_DIM)
    shapes = (sizes.qkv, sizes.hidden), (sizes.hidden, heads), (2 * INTERMEDIATE, sizes.hidden)
    weights = [weight(n, k, sizes.packed) for n, k in (*shapes, (sizes.hidden, INTERMEDIATE))]
    return Layer(*weights, randn(sizes.hidden), randn(*cache), randn(*cache))


def results(sizes: Sizes) -> Results:
    widths = {"qkv": sizes.qkv, "gate_up": 2 * INTERMEDIATE, "activated": INTERMEDIATE}
    shapes = {
        field.name: (sizes.num_rows, widths.get(field.name, sizes.hidden))
        for field in fields(Results)
    }
    heads = dict.fromkeys(("q", "attention"), (sizes.num_rows, sizes.num_q_heads, HEAD_DIM))
    return Results(**{name: randn(*shape) for name, shape in (shapes | heads).items()})


class Chain:
    """Decode steps of a few layers over one set of sequences."""

    def __init__(self, sizes: Sizes) -> None:
        configure_blas()
        device = torch.device("cuda")
        self.lengths = LENGTHS[-sizes.num_rows :]
        lengths = self.lengths + [0] * (sizes.num_rows - len(self.lengths))
        widths = [-(-length // BLOCK_SIZE) for length in lengths]
        table = torch.zeros(sizes.num_rows, 64, dtype=torch.int32)
        for row, width in enumerate(widths):
            table[row, :width] = torch.arange(sum(widths[:row]), sum(widths[: row + 1])) + 1
        self.table = table.to(device)
        self.rows = torch.arange(sizes.num_rows, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.positions = (self.seq_lens - 1).clamp(min=0)
        blocks = self.table.gather(1, (self.positions // BLOCK_SIZE)[:, None].long())[:, 0]
        slots = blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.slots = torch.where(self.seq_lens > 0, slots, -1).int()
        self.plan = DecodePlan.allocate(
            max_rows=64,
            max_seq_len=4096,
            num_q_heads=sizes.num_q_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=HEAD_DIM,
            device=device,
        )
        self.cos_sin = torch.randn(4096, HEAD_DIM, device=device)
        self.x = randn(sizes.num_rows, sizes.hidden)
        self.sizes = sizes
        self.layers = [layer(sizes) for _ in range(NUM_LAYERS)]

    def launch(self, places: list[Results], residual: torch.Tensor, *, dependent: bool) -> None:
        x = self.x
        early = {"dependent": dependent}
        at_once: dict[str, Any] = early | {"early": self.sizes.packed}
        plan_decode(self.plan, self.seq_lens, self.rows, self.table, BLOCK_SIZE, share=False)
        for own, at in zip(self.layers, places, strict=True):
            product(x, own.qkv, at.qkv, **early)
            cache = own.k_cache, own.v_cache
            qk_norm_rope_store_kv(
                at.qkv, self.positions, self.slots, self.cos_sin, *cache, at.q, **early
            )
            where = self.seq_lens, self.rows, self.table, self.plan, at.attention
            kernels = attention_kernels(at.q, own.k_cache)
            kernels.attend_decodes(at.q, *cache, *where, **at_once)
            product(at.attention.flatten(1), own.o, at.o, **early)
            add_rms_norm(at.o, residual, own.norm, 1e-5, at.normed, **at_once)
            product(at.normed, own.gate_up, at.gate_up, **early)
            silu_mul(at.gate_up, at.activated, **at_once)
            product(at.activated, own.down, at.down, **early)
            add_rms_norm(at.down, residual, own.norm, 1e-5, at.out, **at_once)
            x = at.out


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_kernel_that_starts_early_changes_nothing_that_an_earlier_one_computes(
    sizes: Sizes,
) -> None:
    torch.manual_seed(0)
    chain = Chain(sizes)
    first = randn(sizes.num_rows, sizes.hidden)
    expected, found = ([results(sizes) for _ in range(NUM_LAYERS)] for _ in range(2))
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
                got, want = (
                    getattr(places, field.name)[: len(chain.lengths)] for places in (own, others)
                )
                assert torch.equal(got, want), f"{field.name} of layer {i} in replay {replay}"
