"""The table of attention kernels names one set for each kind of queries, cache and layer."""

from __future__ import annotations

import itertools

import pytest
import torch

from headwater.engine_core.platforms.cuda_attention import (
    ANY_GPU,
    HOPPER,
    HOPPER_FP8,
    HOPPER_WIDE,
    HOPPER_WIDE_WINDOW,
    HOPPER_WINDOW,
    AttentionKernels,
    attention_kernels,
)
from headwater.kernels.attention import hopper_attention
from headwater.kernels.attention.decode_plan import DecodePlan

FP8 = torch.float8_e4m3fn
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
# (queries, cache, head_dim): block sizes of caches without gaps, in layers without a window. As
# the launchers chose them themselves at commit 00052bfa.
ON_HOPPER = {
    (torch.bfloat16, torch.bfloat16, 64): (HOPPER, (64, 128)),
    (torch.bfloat16, torch.bfloat16, 128): (HOPPER, (64, 128)),
    (torch.bfloat16, torch.bfloat16, 256): (HOPPER_WIDE, (64, 128)),
    (torch.bfloat16, FP8, 128): (HOPPER_FP8, (64, 128)),
}
IN_WINDOWS = {HOPPER: HOPPER_WINDOW, HOPPER_WIDE: HOPPER_WIDE_WINDOW}
"""Kernels of layers with a window, by those of layers without."""
DECODE_NAMES = {
    # Rows of the batch: kernels on Hopper in 16 bits.
    1: "hopper_decode_attention",
    4: "hopper_decode_attention",
    5: "decode_attention",
    16: "decode_attention",
    17: "hopper_decode_splits",
    64: "hopper_decode_splits",
    65: "decode_attention",
}


def cache_of(dtype: torch.dtype, block_size: int, head_dim: int, *, gaps: bool) -> torch.Tensor:
    blocks = torch.zeros(6, 2, block_size, head_dim).to(dtype)
    return blocks[::2] if gaps else blocks


@pytest.mark.parametrize("is_hopper", [False, True], ids=["another GPU", "Hopper"])
def test_every_kind_of_cache_has_the_kernels_that_its_launchers_chose(
    is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_attention, "is_hopper", lambda device: is_hopper)
    caches = (*QUERY_DTYPES, FP8)
    found = {}
    expected = {}
    for kind in itertools.product(
        QUERY_DTYPES, caches, HEAD_DIMS, BLOCK_SIZES, (0, 64), (False, True)
    ):
        dtype, cache_dtype, head_dim, block_size, window, gaps = kind
        q = torch.zeros(1, 4, head_dim, dtype=dtype)
        cache = cache_of(cache_dtype, block_size, head_dim, gaps=gaps)
        found[kind] = attention_kernels(q, cache, window=window)
        kernels, sizes = ON_HOPPER.get((dtype, cache_dtype, head_dim), (ANY_GPU, ()))
        # Blocks of a layer lie apart: those of other layers are between them.
        of_layer = IN_WINDOWS.get(kernels, ANY_GPU) if window else kernels
        expected[kind] = of_layer if is_hopper and block_size in sizes else ANY_GPU
    assert found == expected


@pytest.mark.parametrize("num_rows", DECODE_NAMES)
def test_hopper_has_kernels_for_plans_without_a_list_and_for_some_dozen_rows(num_rows: int) -> None:
    plan = DecodePlan.allocate(
        max_rows=num_rows,
        max_seq_len=512,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        device=torch.device("cpu"),
    )
    assert HOPPER.decode_of(plan, num_rows).__name__ == DECODE_NAMES[num_rows]
    assert ANY_GPU.decode_of(plan, num_rows).__name__ == "decode_attention"
    is_direct = DECODE_NAMES[num_rows] == "hopper_decode_attention"
    in_window = HOPPER_WINDOW.decode_of(plan, num_rows)
    assert in_window is (HOPPER if is_direct else ANY_GPU).decode_of(plan, num_rows)
    wide = HOPPER_WIDE.decode_of(plan, num_rows).__name__
    assert wide == ("decode_attention" if is_direct else "hopper_decode_splits")


def test_the_rows_of_the_table_name_these_kernels() -> None:
    def names(kernels: AttentionKernels) -> tuple[str, str]:
        return kernels.prefill.__name__, kernels.shared.__name__

    assert names(ANY_GPU) == ("prefill_attention", "shared_prefix_attention")
    assert names(HOPPER) == ("hopper_prefill_attention", "hopper_shared_prefix_attention")
    assert names(HOPPER_WINDOW) == ("hopper_prefill_attention", "shared_prefix_attention")
    assert names(HOPPER_WIDE_WINDOW) == names(ANY_GPU)
    assert names(HOPPER_WIDE) == ("hopper_wide_prefill", "shared_prefix_attention")
    assert names(HOPPER_FP8) == ("hopper_prefill_attention", "shared_prefix_attention")
    assert HOPPER_FP8.few_decode is HOPPER_FP8.direct_decode is ANY_GPU.decode
