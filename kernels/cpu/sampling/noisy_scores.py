"""Scores of tokens with the noise of their draw on a CPU, sixteen at a time: fast, with a small
error. Twin: `kernels.sampling.sample.scores_twin`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ...sampling.gumbel import KEY_STARTS, MULTIPLIERS, PURPOSE_SAMPLE
from ...sampling.token_mask import LOWEST
from ..compiler.compiled import argument
from ..compiler.scalars import int32_at, int64_at, put_int32, size_of
from ..compiler.simd import (
    add,
    choose_below,
    div,
    fma,
    keep_where,
    load,
    maximum,
    minimum,
    mul,
    splat,
    sub,
)
from ..compiler.simd_math import log
from ..compiler.simd_types import F32
from ..compiler.simd_words import (
    add_words,
    mul_words,
    numbers_of,
    shift_right,
    splat_word,
    words_from,
    xor_words,
)

_WORD = 0xFFFFFFFF
_MULTIPLIER_1, _MULTIPLIER_2 = (multiplier & _WORD for multiplier in MULTIPLIERS)
_START_0, _START_1 = KEY_STARTS
_LARGEST = 1 - 2.0**-24
_SMALL = 2.0**-7


@njit
def _mixed(x: int) -> int:
    """Like `gumbel._mix`, for a word 0 … 2³² − 1."""
    x = ((x ^ (x >> 16)) * _MULTIPLIER_1) & _WORD
    x = ((x ^ (x >> 15)) * _MULTIPLIER_2) & _WORD
    return x ^ (x >> 15)


@njit
def _key(start: int, seed: int, choice: int, output: int) -> Any:
    """One of a row's two keys, as `gumbel.noise_keys` has them."""
    key = _mixed(start ^ (seed & _WORD))
    key = _mixed(key ^ ((seed >> 32) & _WORD))
    key = _mixed(key ^ (choice & _WORD))
    return _mixed(_mixed(key ^ (output & _WORD)) ^ PURPOSE_SAMPLE)


@njit
def keys_of_row(arguments: int, i: int) -> Any:
    """Stores a row's two keys, and returns them."""
    p_keys = argument(arguments, 1) + i * 8
    seed = int64_at(argument(arguments, 9) + i * 8)
    choice = int32_at(argument(arguments, 10) + i * 4)
    output = int32_at(argument(arguments, 11) + i * 4)
    put_int32(p_keys, _key(_START_0, seed, choice, output))
    put_int32(p_keys + 4, _key(_START_1, seed, choice, output))
    return int32_at(p_keys), int32_at(p_keys + 4)


@njit
def noisy_scores(
    p_logits: int,
    p_mask: int,
    token: int,
    first: int,
    temperature: Any,
    key_0: int,
    key_1: int,
    element: Any,
) -> Any:
    """Scores of sixteen tokens, with an absolute error of 1e-5; those of a greedy row are exact.
    `first` is added to a token for its noise."""
    x = load(p_logits + token * size_of(element), element)
    if p_mask:
        x = keep_where(maximum(x, splat(F32(LOWEST))), p_mask + token // 8, splat(F32(-np.inf)))
    if temperature == F32(0):
        return x
    h = add_words(words_from(first + token), splat_word(key_0))
    h = mul_words(xor_words(h, shift_right(h, 16)), splat_word(_MULTIPLIER_1))
    h = xor_words(h, splat_word(key_1))
    h = mul_words(xor_words(h, shift_right(h, 15)), splat_word(_MULTIPLIER_2))
    h = xor_words(h, shift_right(h, 15))
    v = mul(add(numbers_of(h), splat(F32(0.5))), splat(F32(2.0**-32)))
    v = minimum(v, splat(F32(_LARGEST)))
    series = fma(v, splat(F32(1 / 3)), splat(F32(0.5)))
    series = mul(v, fma(v, series, splat(F32(1))))
    noise = choose_below(
        v, splat(F32(_SMALL)), series, sub(splat(F32(0)), log(sub(splat(F32(1)), v)))
    )
    return sub(div(x, splat(temperature)), log(noise))
