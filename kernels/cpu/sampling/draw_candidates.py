"""The pass that finds each row's candidates of a draw on a CPU: tokens that could have the highest
score. Sixteen tokens of which the mask allows none cost one look: most masks allow few."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ..compiler.compiled import Kernel, argument, items
from ..compiler.scalars import float32_at, has_bits, int32_at, put, put_int32, size_of
from ..compiler.simd import highest_of, maximum, splat, store
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from .noisy_scores import keys_of_row, noisy_scores

NUM_CANDIDATES = 8
MARGIN = 1e-4
"""Ten times the largest error of a fast score."""
_STRIP = 1024
"""Number of tokens whose highest score is remembered together."""
_LEAST = -3.0e38


@njit
def _row(arguments: int, i: int, p_scratch: int, element: Any) -> None:
    vocab_size = argument(arguments, 5)
    p_logits = argument(arguments, 0) + i * vocab_size * size_of(element)
    p_mask = argument(arguments, 6)
    if p_mask:
        p_mask += i * argument(arguments, 7)
    key_0, key_1 = keys_of_row(arguments, i)
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
                best,
                noisy_scores(p_logits, p_mask, token, first, temperature, key_0, key_1, element),
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
                noisy_scores(p_logits, p_mask, token, first, temperature, key_0, key_1, element),
                F32_ELEMENT,
            )
            for lane in range(NUM_LANES):
                if float32_at(p_some + lane * 4) >= bound:
                    if count < NUM_CANDIDATES:
                        put_int32(p_candidates + count * 4, token + lane)
                    count += 1
    # Unused places repeat the first candidate, so that they add no token.
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
