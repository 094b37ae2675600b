"""Random paged caches and batches for the attention tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headwater.engine_core.platforms.cuda_attention import attention_kernels, given
from headwater.kernels.attention.decode_plan import DecodePlan, plan_decode
from headwater.kernels.attention.online_softmax import SPLIT
from headwater.kernels.attention.paged_cache import unpaired_twin
from headwater.kernels.attention.prefill_attention import prefill_tiles, tokens_per_tile
from tests.long_values import long_but

POISON = 300.0
"""Fills everything that must be overwritten or never weighed; finite, as a cache always is."""


GPU = pytest.mark.gpu
LONG = pytest.mark.long
LONG_INTERPRETED = () if torch.cuda.is_available() else LONG
"""Marks of parameters that `make test` does not interpret. On a GPU they take no time."""
IN_CI = {(16, True), (64, False)}
"""(block size, fp8) that `make test` interprets; `make test-long` has the others, a GPU all."""


def interpreted(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The values as parameters. Where kernels are interpreted, all but `kept` are `long`."""
    return list(values) if torch.cuda.is_available() else long_but(values, *kept)


def formats(*block_sizes: int) -> list[Any]:
    """Parameters `block_size` and `fp8`: each size in bf16 and in fp8."""
    return [
        pytest.param(
            size,
            fp8,
            id=f"{size}-{'fp8' if fp8 else 'bf16'}",
            marks=() if (size, fp8) in IN_CI else LONG,
        )
        for size in block_sizes
        for fp8 in (False, True)
    ]


def shapes_by_type(shapes: list[tuple[int, int]], in_half: set[tuple[int, int]]) -> list[Any]:
    """Parameters `shapes` and `dtype`: all shapes in bfloat16; those of `in_half` in float16 too,
    and the others only in `make test-long`, since the types share all but the last step. A test
    goes over all shapes of a type, since they share what is compiled."""
    others = [shape for shape in shapes if shape not in in_half]
    return [
        pytest.param(shapes, torch.bfloat16, id="bfloat16"),
        pytest.param(sorted(in_half), torch.float16, id="float16"),
        pytest.param(others, torch.float16, id="float16, other shapes", marks=LONG),
    ]


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit on a GPU; the interpreter multiplies with numpy, whose rows depend a little on one
    another."""
    return torch.equal(a, b) if a.is_cuda else relative_error(a, b) < 2e-3


def beside_other_layers(
    k_cache: torch.Tensor, v_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same keys and values, [num_blocks, Hk, block_size, D] each, as the middle one of three
    layers whose caches lie together block by block."""
    num_blocks, *rest = k_cache.shape
    memory = torch.full((num_blocks, 3, 2, *rest), POISON, device=k_cache.device)
    blocks = memory.to(k_cache.dtype)
    blocks[:, 1, 0] = k_cache
    blocks[:, 1, 1] = v_cache
    return blocks[:, 1, 0], blocks[:, 1, 1]


@dataclass(slots=True)
class PagedBatch:
    """Sequences over one shuffled cache; `share` names how many first blocks each has in common
    with sequence 0."""

    seq_lens: list[int]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    generator: torch.Generator
    share: tuple[int, ...] = ()
    fp8: bool = False
    dtype: torch.dtype = torch.bfloat16

    k_cache: torch.Tensor = None  # type: ignore[assignment]
    v_cache: torch.Tensor = None  # type: ignore[assignment]
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    block_tables: torch.Tensor = None  # type: ignore[assignment]
    table_rows: torch.Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        device = self.generator.device
        counts = [-(-n // self.block_size) for n in self.seq_lens]
        num_blocks = sum(counts) + 3
        num_seqs = len(counts)
        shape = (num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        k, v = (torch.randn(shape, generator=self.generator, device=device) for _ in range(2))
        if self.fp8:
            self.k_scale, self.v_scale = (
                torch.rand(self.num_kv_heads, generator=self.generator, device=device) * 0.02 + 0.01
                for _ in range(2)
            )
            self.k_cache, self.v_cache = (
                (x / scale[:, None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
                for x, scale in ((k, self.k_scale), (v, self.v_scale))
            )
        else:
            self.k_cache = k.to(self.dtype)
            self.v_cache = v.to(self.dtype)
        self.k_cache, self.v_cache = beside_other_layers(self.k_cache, self.v_cache)
        # One more table row than sequences, in another order, so that a confusion of rows shows.
        ids = (torch.randperm(num_blocks - 1, generator=self.generator, device=device) + 1).int()
        self.block_tables = torch.zeros(
            num_seqs + 1, max(counts) + 2, dtype=torch.int32, device=device
        )
        self.table_rows = torch.randperm(num_seqs + 1, generator=self.generator, device=device)[
            :num_seqs
        ].int()
        taken = 0
        for i, count in enumerate(counts):
            self.block_tables[self.table_rows[i], :count] = ids[taken : taken + count]
            taken += count
            if i < len(self.share):
                shared = min(self.share[i], count, counts[0])
                self.block_tables[self.table_rows[i], :shared] = self.block_tables[
                    self.table_rows[0], :shared
                ]

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def lengths(self) -> torch.Tensor:
        return torch.tensor(self.seq_lens, dtype=torch.int32, device=self.device)

    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def wide_caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches in float64, unscaled."""
        k = self.k_cache.double()
        v = self.v_cache.double()
        if self.k_scale is not None and self.v_scale is not None:
            k = unpaired_twin(k)
            v = unpaired_twin(v)
            k = k * self.k_scale[:, None, None]
            v = v * self.v_scale[:, None, None]
        return k, v

    def queries(self, num_tokens: int) -> torch.Tensor:
        """Every third token's are eight times as large, so that maxima of tiles differ little and
        widely."""
        shape = (num_tokens, self.num_q_heads, self.head_dim)
        factors = 1 + 7 * (torch.arange(num_tokens, device=self.device) % 3 == 1)
        return (
            torch.randn(shape, generator=self.generator, device=self.device)
            * factors[:, None, None]
        ).to(self.dtype)


def decode(
    batch: PagedBatch,
    q: torch.Tensor,
    rows: list[int] | None = None,
    *,
    share: bool = False,
    layers: int = 1,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    fold: bool = False,
) -> torch.Tensor:
    """Decode attention of these sequences of the batch (all by default), poisoned outputs first; of
    several layers that one plan serves, the last."""
    chosen = torch.tensor(
        list(range(len(batch.seq_lens))) if rows is None else rows, device=batch.device
    )
    seq_lens = batch.lengths()[chosen]
    table_rows = batch.table_rows[chosen]
    plan = DecodePlan.allocate(
        max_rows=len(chosen),
        max_seq_len=max(*batch.seq_lens, SPLIT),
        num_q_heads=batch.num_q_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        device=batch.device,
        fold=fold,
    )
    plan.partial_acc.fill_(POISON)
    plan.partial_ml.fill_(POISON)
    q, out = q[chosen].contiguous(), torch.full_like(q[chosen], POISON)
    plan_decode(
        plan, seq_lens, table_rows, batch.block_tables, batch.block_size, share=share, window=window
    )
    caches = (batch.k_cache, batch.v_cache, seq_lens, table_rows, batch.block_tables, plan, out)
    kernels = attention_kernels(q, batch.k_cache, window=window, is_capped=bool(softcap))
    scales = given(**batch.scales())
    scored = given(softcap=softcap or None, sinks=sinks)
    for _ in range(layers):
        out.fill_(POISON)
        if share:
            kernels.shared(q, *caches, **scales, **scored, scale=scale)
        kernels.attend_decodes(q, *caches, **scales, **scored, scale=scale, window=window)
    return out


def prefill(
    batch: PagedBatch,
    q: torch.Tensor,
    counts: list[int],
    seq_lens: list[int] | None = None,
    *,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    listed_group: int = 0,
) -> torch.Tensor:
    """Prefill attention of the last `counts` tokens of each sequence, whose cached lengths may be
    cut short. listed_group: query heads of a key head for which tiles are listed; 0: their own."""
    lengths = batch.seq_lens if seq_lens is None else seq_lens
    ints = {"dtype": torch.int32, "device": batch.device}
    bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], **ints)
    starts = [n - c for n, c in zip(lengths, counts, strict=True)]
    group = listed_group or batch.num_q_heads // batch.num_kv_heads
    tiles = prefill_tiles(counts, starts, group, batch.device)
    listed = tokens_per_tile(group, batch.device) if listed_group else None
    out = torch.full_like(q, POISON)
    attention_kernels(q, batch.k_cache, window=window, is_capped=bool(softcap)).prefill(
        q,
        batch.k_cache,
        batch.v_cache,
        bounds,
        torch.tensor(lengths, **ints),
        batch.table_rows,
        batch.block_tables,
        tiles,
        out,
        **given(**batch.scales(), window=window or None),
        **given(softcap=softcap or None, sinks=sinks, tile_tokens=listed),
        scale=scale,
    )
    return out
