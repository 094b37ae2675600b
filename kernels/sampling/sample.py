"""Draws one token a row from its logits in one pass: greedy, or temperature with Gumbel noise.
Knows no filters.

The drawn token is argmax(logit / temperature + gumbel); on a tie the smaller id wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .gumbel import PURPOSE_SAMPLE, gumbel_noise, gumbel_of, noise_keys, row_keys
from .token_mask import LOWEST, masked

BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The sampling state of R rows, on the device."""

    temperatures: torch.Tensor
    """float32 [R]; 0: the row is greedy."""
    seeds: torch.Tensor
    """int64 [R]"""
    choice_indices: torch.Tensor
    """int32 [R]"""
    output_indices: torch.Tensor
    """int32 [R]"""

    def select(self, rows: torch.Tensor) -> Draws:
        """The state of some rows, by index or by bool."""
        return Draws(
            temperatures=self.temperatures[rows],
            seeds=self.seeds[rows],
            choice_indices=self.choice_indices[rows],
            output_indices=self.output_indices[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Workspace: the best token of each part of the vocabulary."""

    scores: torch.Tensor
    """float32 [rows, stretches]"""
    ids: torch.Tensor
    """int32 [rows, stretches]"""

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> Candidates:
        # Wide enough for the narrowest stretch any sampler uses: the fused head's.
        shape = (max_rows, triton.cdiv(vocab_size, 64))
        return cls(
            scores=torch.empty(shape, dtype=torch.float32, device=device),
            ids=torch.empty(shape, dtype=torch.int32, device=device),
        )


def sample(
    logits: torch.Tensor,
    draws: Draws,
    candidates: Candidates,
    out: torch.Tensor,
    masks: torch.Tensor | None = None,
) -> None:
    """Draws from logits bf16 or float32 [R, V], under masks int32 [R, words] if given, as if
    `mask_tokens` had masked them; writes out int32 [R]."""
    pick_best(
        candidates, logits.shape[0], best_of_stretches(logits, draws, candidates, masks=masks), out
    )


def best_of_stretches(
    logits: torch.Tensor,
    draws: Draws,
    candidates: Candidates,
    first_token: int = 0,
    masks: torch.Tensor | None = None,
) -> int:
    """Fills the candidates of the tokens first_token … first_token + N - 1, whose logits [R, N],
    and masks if any, are given. Returns how many there are of each row."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert masks is None or (masks.stride(1) == 1 and masks.shape[1] * 32 >= vocab_size)
    num_stretches: int = triton.cdiv(vocab_size, BLOCK)
    _best_of_stretch[(num_rows, num_stretches)](
        logits,
        masks,
        draws.temperatures,
        draws.seeds,
        draws.choice_indices,
        draws.output_indices,
        candidates.scores,
        candidates.ids,
        logits.stride(0),
        0 if masks is None else masks.stride(0),
        candidates.ids.stride(0),
        vocab_size,
        first_token,
        BLOCK=BLOCK,
        LOWEST=LOWEST,
        PURPOSE=PURPOSE_SAMPLE,
        ON_GPU=logits.is_cuda,
        num_warps=4,
    )
    return num_stretches


def pick_best(candidates: Candidates, num_rows: int, num_stretches: int, out: torch.Tensor) -> None:
    _pick_best[(num_rows,)](
        candidates.scores,
        candidates.ids,
        out,
        candidates.ids.stride(0),
        num_stretches,
        BLOCK=triton.next_power_of_2(num_stretches),
        num_warps=4,
    )


def scores_twin(logits: torch.Tensor, draws: Draws, first_token: int = 0) -> torch.Tensor:
    """Perturbed scores float32 [R, V] of the tokens from `first_token` on, in plain torch; the
    drawn token is their argmax."""
    tokens = torch.arange(
        first_token, first_token + logits.shape[1], device=logits.device, dtype=torch.int32
    )
    noise = gumbel_noise(
        noise_keys(draws.seeds, draws.choice_indices, draws.output_indices), tokens
    )
    is_greedy = draws.temperatures[:, None] == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, draws.temperatures[:, None])
    return torch.where(is_greedy, scaled, scaled + noise)


@triton.jit
def perturb(b_logit, o_token, inverse_temperature, key_0, key_1, is_greedy, ON_GPU: tl.constexpr):
    """Scores of tokens; every sampler here uses this, so that all of them draw the same token."""
    b_noise = tl.where(is_greedy, 0.0, gumbel_of(key_0, key_1, o_token, ON_GPU))
    return tl.fma(b_logit, inverse_temperature + tl.zeros_like(b_logit), b_noise)


@triton.jit
def best_token(b_score, b_id):
    """The highest score of a block and the smallest id with it; the smallest id of all if scores
    are no numbers."""
    score = tl.max(b_score, axis=0)
    token = tl.min(tl.where(b_score == score, b_id, 0x7FFFFFFF), axis=0)
    return score, tl.where(token == 0x7FFFFFFF, tl.min(b_id, axis=0), token)


@triton.jit
def _best_of_stretch(
    p_logit,
    p_mask,
    p_temperature,
    p_seed,
    p_choice,
    p_output,
    p_score,
    p_id,
    stride_logit,
    stride_mask,
    stride_candidate,
    vocab_size,
    first_token,
    BLOCK: tl.constexpr,
    LOWEST: tl.constexpr,
    PURPOSE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_stretch = tl.program_id(1)
    o_v = i_stretch * BLOCK + tl.arange(0, BLOCK)
    b_logit = tl.load(
        p_logit + i_row * stride_logit + o_v, mask=o_v < vocab_size, other=float("-inf")
    ).to(tl.float32)
    if p_mask is not None:
        b_logit = masked(b_logit, p_mask + i_row * stride_mask, o_v, vocab_size, LOWEST)
    temperature = tl.load(p_temperature + i_row)
    is_greedy = temperature == 0.0
    if is_greedy:
        b_score = b_logit
    else:
        key_0, key_1 = row_keys(
            tl.load(p_seed + i_row), tl.load(p_choice + i_row), tl.load(p_output + i_row), PURPOSE
        )
        b_score = perturb(
            b_logit, first_token + o_v, 1.0 / temperature, key_0, key_1, False, ON_GPU
        )
    score, token = best_token(b_score, first_token + o_v)
    tl.store(p_score + i_row * stride_candidate + i_stretch, score)
    tl.store(p_id + i_row * stride_candidate + i_stretch, token)


@triton.jit
def _pick_best(p_score, p_id, p_out, stride_candidate, num_stretches, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, BLOCK)
    b_score = tl.load(
        p_score + i_row * stride_candidate + o_s, mask=o_s < num_stretches, other=float("-inf")
    )
    b_id = tl.load(
        p_id + i_row * stride_candidate + o_s, mask=o_s < num_stretches, other=0x7FFFFFFF
    )
    _, token = best_token(b_score, b_id)
    tl.store(p_out + i_row, token)
