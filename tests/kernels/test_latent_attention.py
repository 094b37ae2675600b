"""Latent attention on a CPU: against the twin in float64, and the bits of positions in any chunk
and company."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.cpu.attention import plan_attention
from headwater.kernels.cpu.latent.head_products import absorbed_queries, head_values
from headwater.kernels.cpu.latent.latent_attention import latent_attention
from headwater.kernels.cpu.latent.store_latents import store_latents
from headwater.kernels.latent.latent_twin import latent_attention_twin, store_latents_twin

BLOCK = 16
EPS = 1e-5
DTYPES = pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bf16"]
)


class Shape(NamedTuple):
    heads: int
    rank: int
    rotary: int
    plain: int
    value: int

    @property
    def width(self) -> int:
        return self.rank + self.rotary

    @property
    def scale(self) -> float:
        return (self.plain + self.rotary) ** -0.5


SHAPES = [Shape(3, 48, 16, 32, 16), Shape(16, 512, 64, 128, 128), Shape(5, 256, 32, 64, 64)]
SMALL = SHAPES[0]
LENGTH = 300


class Sequence:
    """Random inputs of one layer for the tokens of a sequence."""

    def __init__(self, shape: Shape, length: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(dtype)

        self.shape = shape
        self.q = randn(length, shape.heads, shape.plain + shape.rotary)
        self.kv = randn(length, shape.width)
        self.norm = randn(shape.rank)
        self.kv_b = randn(shape.heads, shape.plain + shape.value, shape.rank) * shape.rank**-0.5
        self.cos_sin = torch.rand(length, shape.rotary, generator=generator)
        num_blocks = -(-length // BLOCK)
        # Blocks in an order of their own, among the layers of a page.
        self.table = (torch.randperm(num_blocks, generator=generator) + 1).int()[None]
        pages = torch.zeros(num_blocks + 1, 3, BLOCK, shape.width, dtype=dtype)
        self.cache = pages[:, 1]

    def stored(self, begin: int, end: int, pairs: RotaryPairs | None = None) -> torch.Tensor:
        """Stores the latents of tokens; returns their queries."""
        q = self.q[begin:end].clone()
        positions = torch.arange(begin, end)
        slots = self.table[0][positions // BLOCK].long() * BLOCK + positions % BLOCK
        store_latents(
            q,
            self.kv[begin:end],
            positions,
            slots,
            self.cos_sin,
            self.cache,
            norm=self.norm,
            eps=EPS,
            pairs=pairs or RotaryPairs(self.shape.rotary, interleaved=True),
        )
        return q

    def attended(self, q: torch.Tensor, starts: list[int], counts: list[int]) -> torch.Tensor:
        """Outputs of queries of the sequence, in requests that begin at some positions."""
        shape = self.shape
        plan = plan_attention(starts, counts, self.table.expand(len(starts), -1), shape.heads)
        absorbed = absorbed_queries(q, self.kv_b, shape.rank, shape.width)
        attended = latent_attention(absorbed, self.cache, plan, shape.rank, shape.scale)
        return head_values(attended, self.kv_b, shape.value)

    def all_at_once(self) -> torch.Tensor:
        length = len(self.q)
        return self.attended(self.stored(0, length), [0], [length])


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prompt_matches_the_twin(shape: Shape, dtype: torch.dtype, close: float) -> None:
    inputs = Sequence(shape, LENGTH, dtype)

    out = inputs.all_at_once()

    wide = Sequence(shape, LENGTH, dtype)
    twin_cache = torch.zeros(wide.cache.shape, dtype=torch.float64)
    positions = torch.arange(LENGTH)
    slots = wide.table[0][positions // BLOCK].long() * BLOCK + positions % BLOCK
    q = store_latents_twin(
        wide.q.double(),
        wide.kv.double(),
        positions,
        slots,
        wide.cos_sin,
        twin_cache,
        norm=wide.norm.double(),
        eps=EPS,
        pairs=RotaryPairs(shape.rotary, interleaved=True),
    )
    torch.testing.assert_close(inputs.cache.double(), twin_cache, rtol=close, atol=close)
    table = wide.table[0]
    options = {"rotary": shape.rotary, "scale": shape.scale}
    expected = latent_attention_twin(q, wide.kv_b.double(), twin_cache, table, LENGTH, **options)
    torch.testing.assert_close(out.double(), expected.flatten(1), rtol=close, atol=close)


def test_halves_of_what_rotates_may_rotate_with_each_other() -> None:
    ours, theirs = (Sequence(SMALL, 40, torch.float32) for _ in range(2))
    pairs = RotaryPairs(SMALL.rotary)
    positions = torch.arange(40)
    slots = theirs.table[0][positions // BLOCK].long() * BLOCK + positions % BLOCK
    expected = store_latents_twin(
        theirs.q,
        theirs.kv,
        positions,
        slots,
        theirs.cos_sin,
        theirs.cache,
        norm=theirs.norm,
        eps=EPS,
        pairs=pairs,
    )

    torch.testing.assert_close(ours.stored(0, 40, pairs), expected)
    torch.testing.assert_close(ours.cache, theirs.cache)


@DTYPES
@pytest.mark.parametrize(
    "borders",
    [[0, 255, 256, 257, LENGTH], [0, 7, 16, 17, 290, LENGTH], list(range(LENGTH + 1))],
    ids=["around a chunk", "odd sizes", "one by one"],
)
def test_passes_of_any_sizes_give_a_position_the_same_bits(
    borders: list[int], dtype: torch.dtype, close: float
) -> None:
    expected = Sequence(SMALL, LENGTH, dtype).all_at_once()
    inputs = Sequence(SMALL, LENGTH, dtype)

    parts = [
        inputs.attended(inputs.stored(begin, end), [begin], [end - begin])
        for begin, end in pairwise(borders)
    ]

    assert torch.equal(torch.cat(parts), expected)


@DTYPES
def test_company_does_not_change_a_position(dtype: torch.dtype, close: float) -> None:
    inputs = Sequence(SMALL, LENGTH, dtype)
    q = inputs.stored(0, LENGTH)
    expected = inputs.attended(q, [0], [LENGTH])

    starts, counts = [290, 3, 100, 0], [10, 1, 150, 20]
    rows = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    places = [place for row in rows for place in row]
    out = inputs.attended(q[places], starts, counts)

    assert torch.equal(out, expected[places])


def test_latents_that_a_position_does_not_see_may_hold_anything_finite() -> None:
    inputs = Sequence(SMALL, 40, torch.float32)
    expected = inputs.all_at_once()
    behind = Sequence(SMALL, 40, torch.float32)
    q = behind.stored(0, 40)
    last = int(behind.table[0][-1])
    behind.cache[last, 40 % BLOCK :] = 1e30
    behind.cache[0] = 1e30

    assert torch.equal(behind.attended(q, [0], [40]), expected)
