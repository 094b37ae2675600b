"""Counter-based noise: a pure function of (seed, choice index, output index, token id, purpose).

The hash is 32-bit integer arithmetic, the same in torch and in Triton to the last bit; knows
nothing about logits. A token is drawn as argmax(logit / temperature + gumbel), so a draw needs no
sum over the vocabulary and no state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PURPOSE_SAMPLE = 0
"""Purpose of the draw of a token. Draws for anything else have a number of their own."""

# Multipliers of lowbias32 (Chris Wellons, "Prospecting for Hash Functions") as signed 32-bit
# integers.
MULTIPLIERS = _MULTIPLIER_1, _MULTIPLIER_2 = 0x21F0AAAD, 0xD35A2D97 - (1 << 32)
KEY_STARTS = 0x243F6A88, 0x13198A2E
"""Initial value of both words of a row's key."""
_SMALL = 2.0**-7
"""Bound below which 1 - v loses digits that decide which token wins, so that a series replaces the
logarithm."""

_LARGEST = 1 - 2.0**-24


def noise_keys(
    seeds: torch.Tensor,
    choice_indices: torch.Tensor,
    output_indices: torch.Tensor,
    purpose: int = PURPOSE_SAMPLE,
) -> torch.Tensor:
    """Two 32-bit words a row that stand for everything but the token id.

    seeds is int64 [R] (all 64 bits count), the others int32 [R]; returns int32 [R, 2].
    """
    words = (seeds.to(torch.int32), (seeds >> 32).to(torch.int32), choice_indices, output_indices)
    # Both words side by side: a step of a small model on a CPU spent a fifth of its time here, one
    # by one (2026-11-22).
    keys = torch.stack([torch.full_like(words[0], start) for start in KEY_STARTS], dim=-1)  # [R, 2]
    for word in words:
        keys = _mix(keys ^ word.to(torch.int32)[:, None])
    return _mix(keys ^ purpose)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [R, N]: keys int32 [R, 2] from `noise_keys`, token_ids int32
    [N] or [R, N]."""
    return exponential_noise(keys, token_ids).log_().neg_()


def exponential_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard exponential noise E, float32 [R, N]; the token with the least E / probability is the
    drawn one."""
    h = token_hash(keys, token_ids).to(torch.float64)
    h = (h + (h < 0) * 2.0**32).to(torch.float32).to(torch.float64)
    v = ((h + 0.5) * 2.0**-32).to(torch.float32).clamp_(max=_LARGEST)
    series = v * (1 + v * (0.5 + v * (1 / 3)))
    return torch.where(v < _SMALL, series, -torch.log1p(-v))


def token_hash(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform 32-bit words, int32 [R, N]."""
    h = token_ids + keys[:, :1]
    h ^= (h >> 16) & 0xFFFF
    h *= _MULTIPLIER_1
    h ^= keys[:, 1:]
    h ^= (h >> 15) & 0x1FFFF
    h *= _MULTIPLIER_2
    h ^= (h >> 15) & 0x1FFFF
    return h


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _MULTIPLIER_1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _MULTIPLIER_2
    return x ^ ((x >> 15) & 0x1FFFF)


@triton.jit
def mix_bits(x):
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def absorb_row(start, seed, i_choice, i_output, PURPOSE: tl.constexpr):
    key = mix_bits(start ^ seed.to(tl.uint32))
    key = mix_bits(key ^ (seed >> 32).to(tl.uint32))
    key = mix_bits(key ^ i_choice.to(tl.uint32))
    key = mix_bits(key ^ i_output.to(tl.uint32))
    return mix_bits(key ^ PURPOSE)


@triton.jit
def row_keys(seed, i_choice, i_output, PURPOSE: tl.constexpr):
    """Triton version of `noise_keys`: seed int64, indices int32, scalars or blocks; returns two
    uint32."""
    zero = (seed * 0).to(tl.uint32)
    key_0 = absorb_row(zero + 0x243F6A88, seed, i_choice, i_output, PURPOSE)
    key_1 = absorb_row(zero + 0x13198A2E, seed, i_choice, i_output, PURPOSE)
    return key_0, key_1


@triton.jit
def hash_tokens(key_0, key_1, o_token):
    h = o_token.to(tl.uint32) + key_0
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = h ^ key_1
    h = (h ^ (h >> 15)) * 0xD35A2D97
    return h ^ (h >> 15)


@triton.jit
def log2_of(x, APPROXIMATE: tl.constexpr):
    """Base-2 logarithm: one instruction on the GPU (absolute error 2^-22), the library's in the
    interpreter, which has no assembly."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def gumbel_of(key_0, key_1, o_token, APPROXIMATE: tl.constexpr):
    """Standard Gumbel noise of the tokens o_token."""
    h = hash_tokens(key_0, key_1, o_token)
    v = tl.fma(h.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    v = tl.minimum(v, 0.99999994039535522)
    series = v * tl.fma(v, tl.fma(v, 0.3333333432674408, 0.5), 1.0)
    exact = log2_of(1.0 - v, APPROXIMATE) * -0.6931471805599453
    b_exponential = tl.where(v < 0.0078125, series, exact)
    return log2_of(b_exponential, APPROXIMATE) * -0.6931471805599453
