"""Sums of the outputs of few tokens' experts and of their shared expert, as `combine` and
`gated_sum` add them, by the last program of `expert_rows` that has made some of the outputs: no
other kernel needs to start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .combine import add_weighted, load_outputs
from .gated_sum import add_shared, share_of


@dataclass(frozen=True, slots=True, eq=False)
class RowSums:
    """Outputs for the sums of T tokens, and the tensors that they are computed from."""

    out: torch.Tensor
    """Sums [T, H]."""
    weights: torch.Tensor
    """float32 [T, k]"""
    num_done: torch.Tensor
    """int32, one or more for each tile of outputs: number of programs that are done, zeros
    before."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Weights of a shared expert that has the sizes of the others."""

    weight: torch.Tensor
    """[2 I, H], or [H, I]."""
    gate: torch.Tensor | None
    """[1, H], of the expert's share; None: it is added as it is."""
    shares: torch.Tensor | None
    """float32 [T], made beside the gates and read with the sums; None without a gate."""


@triton.jit
def clear_counts(p_num_done, COUNT: tl.constexpr):
    """Writes zeros, the first program alone."""
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    o_part = tl.arange(0, COUNT)
    tl.store(p_num_done + o_part, tl.zeros_like(o_part), mask=is_first & (o_part >= 0))


@triton.jit
def make_shares(p_x, p_gate, p_shares, num_tokens, stride_x, width, BLOCK: tl.constexpr):
    """Shares of the tokens' shared expert."""
    o_i = tl.arange(0, BLOCK)
    inside = o_i < width
    b_gate = tl.load(p_gate + o_i, mask=inside, other=0.0).to(tl.float32)
    for i in range(num_tokens):
        tl.store(p_shares + i, share_of(p_x + o_i, inside, b_gate))
        p_x += stride_x


@triton.jit
def add_outputs(
    p_out,
    p_sums,
    p_weights,
    p_shares,
    p_num_done,
    num_pairs,
    num_programs,
    o_out,
    n,
    CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Writes the sums [tokens, N] of outputs o_out, in the last program that has made some of them.
    Rows of the shared expert lie behind those of pairs."""
    tl.debug_barrier()
    num_done = tl.atomic_add(p_num_done + tl.program_id(1), 1, sem="acq_rel")
    if num_done == num_programs - 1:
        num_tokens = num_pairs // CHOSEN
        o_token = tl.arange(0, TOKENS)[:, None]
        # Padding adds what the last token does.
        o_own = tl.minimum(o_token, num_tokens - 1)
        inside = (o_out < n)[None, :] & (o_token < num_tokens)
        b_sum = tl.zeros((TOKENS, o_out.shape[0]), tl.float32)
        dtype: tl.constexpr = p_sums.dtype.element_ty
        for i in tl.static_range(CHOSEN):
            o_pair = o_own * CHOSEN + i
            b_y = load_outputs(p_out, None, None, None, o_pair, o_out[None, :], inside, n)
            b_sum = add_weighted(b_sum, tl.load(p_weights + o_pair), b_y)
        p_shared = p_out + (num_pairs + o_own).to(tl.int64) * n + o_out[None, :]
        b_shared = tl.load(p_shared, mask=inside, other=0.0)
        share = 1.0 if p_shares is None else tl.load(p_shares + o_own)
        # Rounded as a sum that is stored.
        b_sum = add_shared(b_sum.to(dtype), b_shared, share)
        tl.store(p_sums + o_token * n + o_out[None, :], b_sum.to(dtype), mask=inside)
