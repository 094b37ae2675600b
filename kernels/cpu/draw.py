"""Draws tokens from whole rows of logits on a CPU: the same that `sample.scores_twin` has highest,
or, where the temperature is 0, the first of the likeliest.

A fast pass finds every row's few tokens that could have the highest score; only their scores are
computed exactly. Sixteen tokens of which the mask allows none cost one look: most masks allow few.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from ..sampling.gumbel import KEY_STARTS, MULTIPLIERS, PURPOSE_SAMPLE, gumbel_noise, noise_keys
from ..sampling.sample import Draws, scores_twin
from ..sampling.token_mask import LOWEST, mask_tokens_twin
from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import float32_at, has_bits, int32_at, int64_at, put, put_int32, size_of
from .compiler.simd import (
    add,
    choose_below,
    div,
    fma,
    highest_of,
    keep_where,
    load,
    maximum,
    minimum,
    mul,
    splat,
    store,
    sub,
)
from .compiler.simd_math import log
from .compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from .compiler.simd_words import (
    add_words,
    mul_words,
    numbers_of,
    shift_right,
    splat_word,
    words_from,
    xor_words,
)

NUM_CANDIDATES = 8
MARGIN = 1e-4
"""Ten times the largest error of a fast score."""
_STRIP = 1024
"""Number of tokens whose highest score is remembered together."""
_WORD = 0xFFFFFFFF
_MULTIPLIER_1, _MULTIPLIER_2 = (multiplier & _WORD for multiplier in MULTIPLIERS)
_START_0, _START_1 = KEY_STARTS
_LEAST = -3.0e38
_LARGEST = 1 - 2.0**-24
_SMALL = 2.0**-7


def draw(
    logits: torch.Tensor, draws: Draws, masks: torch.Tensor | None = None, *, first_token: int = 0
) -> torch.Tensor:
    """Draws from logits [R, V], float32 or bfloat16, under masks int32 [R, words] as `mask_tokens`
    has them; returns int32 [R]. The noise is that of the tokens from `first_token` on, which is
    token 0 of what is returned."""
    logits, (num_rows, vocab_size) = logits.contiguous(), logits.shape
    if vocab_size < NUM_LANES:
        wide = logits if masks is None else mask_tokens_twin(logits, masks)
        return scores_twin(wide, draws, first_token).argmax(1).int()
    if masks is not None and vocab_size % NUM_LANES:
        return draw(mask_tokens_twin(logits, masks), draws, first_token=first_token)
    keys = torch.empty(num_rows, 2, dtype=torch.int32)
    candidates = torch.zeros(num_rows, NUM_CANDIDATES, dtype=torch.int32)
    counts = torch.empty(num_rows, dtype=torch.int32)
    seeds = draws.seeds.contiguous()
    choices = draws.choice_indices.int().contiguous()
    temperatures = draws.temperatures.contiguous()
    outputs = draws.output_indices.int().contiguous()
    addresses = [tensor.data_ptr() for tensor in (logits, keys, temperatures, candidates, counts)]
    mask = (0, 0) if masks is None else (masks.data_ptr(), masks.stride(0) * 4)
    of_keys = [tensor.data_ptr() for tensor in (seeds, choices, outputs)]
    KERNEL(
        logits.dtype,
        num_rows,
        8 * logits.numel(),
        *addresses,
        vocab_size,
        *mask,
        first_token,
        *of_keys,
    )
    tokens = candidates[:, 0].clone()
    # Nearly every draw has a single candidate, whose exact score decides nothing.
    undecided = np.flatnonzero((temperatures.numpy() > 0) & (counts.numpy() != 1))
    if undecided.size:
        at = torch.from_numpy(undecided)
        some = logits[at] if masks is None else mask_tokens_twin(logits[at], masks[at])
        tokens[at] = _best_of(
            some, candidates[at], counts[at], keys[at], draws.select(at), first_token
        )
    return tokens


def _best_of(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    counts: torch.Tensor,
    keys: torch.Tensor,
    draws: Draws,
    first_token: int,
) -> torch.Tensor:
    """Tokens int32 [R] with the highest exact score of the candidates [R, NUM_CANDIDATES], or of
    all tokens where more were counted. logits [R, V] are masked; all rows are random."""
    scaled = logits.gather(1, candidates.long()).float() / draws.temperatures[:, None]
    best = (scaled + gumbel_noise(keys, candidates + first_token)).argmax(1, keepdim=True)
    tokens = candidates.gather(1, best)[:, 0]
    crowded = torch.nonzero(counts > NUM_CANDIDATES)[:, 0]
    if len(crowded):
        tokens[crowded] = (
            scores_twin(logits[crowded], draws.select(crowded), first_token).argmax(1).int()
        )
    return tokens


def scores_of(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    draws: Draws,
    masks: torch.Tensor | None = None,
    *,
    first_token: int = 0,
) -> torch.Tensor:
    """Scores float32 [R] of tokens int32 [R], as `draw` compares them; minus infinity where a mask
    excludes them."""
    scores = logits.gather(1, tokens[:, None].long())[:, 0].float()
    if masks is not None:
        words = masks.gather(1, tokens[:, None].long() // 32)[:, 0]
        is_allowed = (words >> (tokens % 32)) & 1 != 0
        scores = scores.clamp_(min=LOWEST).masked_fill_(~is_allowed, -np.inf)
    keys = noise_keys(draws.seeds, draws.choice_indices, draws.output_indices)
    noise = gumbel_noise(keys, tokens[:, None] + first_token)[:, 0]
    is_random = draws.temperatures > 0
    return torch.where(
        is_random, scores / torch.where(is_random, draws.temperatures, 1.0) + noise, scores
    )


@njit
def _mixed(x: int) -> int:
    """As `gumbel._mix`, of a word 0 … 2³² − 1."""
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
def _keys(arguments: int, i: int) -> Any:
    """Stores a row's two keys, and returns them."""
    p_keys = argument(arguments, 1) + i * 8
    seed = int64_at(argument(arguments, 9) + i * 8)
    choice = int32_at(argument(arguments, 10) + i * 4)
    output = int32_at(argument(arguments, 11) + i * 4)
    put_int32(p_keys, _key(_START_0, seed, choice, output))
    put_int32(p_keys + 4, _key(_START_1, seed, choice, output))
    return int32_at(p_keys), int32_at(p_keys + 4)


@njit
def _scores(
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


@njit
def _row(arguments: int, i: int, p_scratch: int, element: Any) -> None:
    vocab_size = argument(arguments, 5)
    p_logits = argument(arguments, 0) + i * vocab_size * size_of(element)
    p_mask = argument(arguments, 6)
    if p_mask:
        p_mask += i * argument(arguments, 7)
    key_0, key_1 = _keys(arguments, i)
    temperature = float32_at(argument(arguments, 2) + i * 4)
    first = argument(arguments, 8)
    p_candidates = argument(arguments, 3) + i * NUM_CANDIDATES * 4
    p_count = argument(arguments, 4) + i * 4
    highest = F32(_LEAST)
    for strip in range(0, vocab_size, _STRIP):
        best = splat(F32(_LEAST))
        for at in range(strip, min(strip + _STRIP, vocab_size), NUM_LANES):
            # The last sixteen may have been seen in part.
            token = min(at, vocab_size - NUM_LANES)
            if p_mask and not has_bits(p_mask + token // 8):
                continue
            best = maximum(
                best, _scores(p_logits, p_mask, token, first, temperature, key_0, key_1, element)
            )
        of_strip = highest_of(best)
        put(p_scratch + strip // _STRIP * 4, of_strip, F32_ELEMENT)
        highest = max(highest, of_strip)
    bound = highest if temperature == F32(0) else highest - F32(MARGIN)
    p_some = p_scratch + (vocab_size // _STRIP + 1) * 4
    count = 0
    for strip in range(0, vocab_size, _STRIP):
        if float32_at(p_scratch + strip // _STRIP * 4) < bound:
            continue
        for at in range(strip, min(strip + _STRIP, vocab_size), NUM_LANES):
            token = min(at, vocab_size - NUM_LANES)
            if p_mask and not has_bits(p_mask + token // 8):
                continue
            store(
                p_some,
                _scores(p_logits, p_mask, token, first, temperature, key_0, key_1, element),
                F32_ELEMENT,
            )
            for lane in range(NUM_LANES):
                if float32_at(p_some + lane * 4) >= bound:
                    if count < NUM_CANDIDATES:
                        put_int32(p_candidates + count * 4, token + lane)
                    count += 1
    # Places that are left repeat the first, so that no other token comes in by them.
    for place in range(count, NUM_CANDIDATES):
        put_int32(p_candidates + place * 4, int32_at(p_candidates))
    put_int32(p_count, count)


def _rows(element: Any) -> Any:
    def work(arguments: int) -> None:
        scratch = np.empty(argument(arguments, 5) // _STRIP + 1 + NUM_LANES, np.float32)
        for i in items(arguments):
            _row(arguments, i, scratch.ctypes.data, element)

    return work


KERNEL = Kernel(_rows(F32_ELEMENT), _rows(BF16_ELEMENT))
