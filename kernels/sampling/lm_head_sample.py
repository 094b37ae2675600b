"""The LM head and the draw in one kernel, for few rows: logits never reach memory. Knows no
filters.

Logits are rounded to the dtype they would have been stored in, so the token is the one `sample`
would have drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..gemm.gemm import multiply_tiles
from ..launch.dependent_launch import launch_options, wait_for_inputs
from .gumbel import PURPOSE_SAMPLE, row_keys
from .sample import Candidates, Draws, perturb, pick_best

MAX_ROWS = 16
BLOCK_N = 64
BLOCK_K = 128


def lm_head_sample(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    draws: Draws,
    candidates: Candidates,
    out: torch.Tensor,
    *,
    dependent: bool = False,
) -> None:
    """Draws from hidden [R, H] with R at most 16 and weight [V, H]; writes out int32 [R]."""
    num_stretches = best_of_head(hidden, weight, draws, candidates, dependent=dependent)
    pick_best(candidates, hidden.shape[0], num_stretches, out)


def best_of_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    draws: Draws,
    candidates: Candidates,
    first_token: int = 0,
    *,
    dependent: bool = False,
) -> int:
    """Fills the candidates of the tokens first_token … first_token + N - 1, whose rows [N, H] of
    the head are given. Returns how many there are of each row of hidden."""
    num_rows, k = hidden.shape
    vocab_size = weight.shape[0]
    assert num_rows <= MAX_ROWS
    assert hidden.stride(1) == weight.stride(1) == 1
    num_stretches: int = triton.cdiv(vocab_size, BLOCK_N)
    block_k = BLOCK_K if k % BLOCK_K == 0 else 64
    _head_and_best[(num_stretches,)](
        hidden,
        weight,
        draws.temperatures,
        draws.seeds,
        draws.choice_indices,
        draws.output_indices,
        candidates.scores,
        candidates.ids,
        num_rows,
        vocab_size,
        k,
        hidden.stride(0),
        weight.stride(0),
        candidates.ids.stride(0),
        first_token,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        EVEN_K=k % block_k == 0,
        PURPOSE=PURPOSE_SAMPLE,
        ON_GPU=hidden.is_cuda,
        DEPENDENT=dependent,
        num_warps=4,
        num_stages=5,
        **launch_options(dependent),
    )
    return num_stretches


@triton.jit(do_not_specialize=["num_rows"])
def _head_and_best(
    p_hidden,
    p_weight,
    p_temperature,
    p_seed,
    p_choice,
    p_output,
    p_score,
    p_id,
    num_rows,
    vocab_size,
    k,
    stride_hidden,
    stride_weight,
    stride_candidate,
    first_token,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PURPOSE: tl.constexpr,
    ON_GPU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_stretch = tl.program_id(0)
    o_m = tl.arange(0, BLOCK_M)
    o_n = (i_stretch * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    is_m = o_m < num_rows
    is_n = o_n < vocab_size
    wait_for_inputs(DEPENDENT)
    p_x = p_hidden + o_m[:, None] * stride_hidden
    p_w = p_weight + o_n.to(tl.int64) * stride_weight
    b_logit = multiply_tiles(p_x, p_w, is_m[:, None], is_n, k, BLOCK_K, EVEN_K, True)
    b_logit = b_logit.to(p_hidden.dtype.element_ty).to(tl.float32)

    b_temperature = tl.load(p_temperature + o_m, mask=is_m, other=0.0)
    b_greedy = b_temperature == 0.0
    b_inverse = 1.0 / tl.where(b_greedy, 1.0, b_temperature)
    b_key_0, b_key_1 = row_keys(
        tl.load(p_seed + o_m, mask=is_m, other=0),
        tl.load(p_choice + o_m, mask=is_m, other=0),
        tl.load(p_output + o_m, mask=is_m, other=0),
        PURPOSE,
    )
    b_score = perturb(
        b_logit,
        first_token + o_n,
        b_inverse[None, :],
        b_key_0[None, :],
        b_key_1[None, :],
        b_greedy[None, :],
        ON_GPU,
    )
    b_score = tl.where(is_n, b_score, float("-inf"))
    b_best = tl.max(b_score, axis=0)
    b_id = tl.min(tl.where(b_score == b_best[None, :], o_n, 0x7FFFFFFF), axis=0)
    tl.store(p_score + o_m * stride_candidate + i_stretch, b_best, mask=is_m)
    b_id = first_token + tl.where(b_id == 0x7FFFFFFF, i_stretch * BLOCK_N, b_id)
    tl.store(p_id + o_m * stride_candidate + i_stretch, b_id, mask=is_m)
