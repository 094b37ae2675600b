"""Choice of the latents that tokens attend to, on a CPU: scores of a sparse indexer, and the
latents with the highest ones, gathered in the order of positions. Twin:
`kernels.latent.index_twin`.

A position's score has one order of sums, whatever is beside it, and of equal scores the first
position is higher.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from ..compiler.compiled import Kernel, argument, items
from ..compiler.scalars import float32_at, int32_at, put, size_of
from ..compiler.simd import fma, load, splat, store, sum_of
from ..compiler.simd_types import BF16_ELEMENT, F32, F32_ELEMENT, NUM_LANES
from .chosen_plan import ChosenPiece

KEYS = 256
"""Number of keys in an item of work, which has one token."""
_TOGETHER = 4
"""Keys that a head meets at once."""
_NUM_COLUMNS = 3


def choose_latents(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    piece: ChosenPiece,
    width: int,
    gathered: torch.Tensor,
) -> None:
    """Writes the chosen latents of each of a piece's N tokens to gathered [N, room, width], those
    of the highest scores in the order of positions. q [N, Hi, D], contiguous, of the indexer;
    head_weights float32 [N, Hi]; cache [num_blocks, block_size, width + D] of latents and keys."""
    _, num_heads, dim = q.shape
    num_tokens = len(piece.tokens)
    assert len(q) == len(head_weights) == len(gathered) == num_tokens
    assert q.is_contiguous()
    assert head_weights.is_contiguous()
    assert gathered.is_contiguous()
    assert q.dtype == cache.dtype == gathered.dtype
    assert head_weights.dtype == torch.float32
    assert cache.shape[2] == width + dim
    assert cache.stride(2) == 1
    assert dim % NUM_LANES == width % NUM_LANES == 0
    num_chunks = -(-piece.num_keys // KEYS)
    scores = torch.empty(num_tokens, num_chunks * KEYS)
    arguments = (
        *(q.data_ptr(), head_weights.data_ptr(), cache.data_ptr(), block_tables.data_ptr()),
        *(piece.tokens.ctypes.data, scores.data_ptr(), gathered.data_ptr()),
        *(num_heads, dim, width, block_tables.shape[1], num_chunks, gathered.shape[1]),
        *(cache.shape[1], cache.stride(0), cache.stride(1)),
    )
    work = num_tokens * piece.num_keys * num_heads * dim
    SCORES(q.dtype, num_tokens * num_chunks, work, *arguments)
    CHOICE(q.dtype, num_tokens, gathered.numel(), *arguments)


@njit
def _address_of(arguments: int, i: int, position: int, element: Any) -> Any:
    """Address of what is cached for a position of token i's sequence."""
    row = int32_at(argument(arguments, 4) + (i * _NUM_COLUMNS + 1) * 4)
    block_size = argument(arguments, 13)
    p_table = argument(arguments, 3) + row * argument(arguments, 10) * 4
    block = int32_at(p_table + position // block_size * 4)
    at = block * argument(arguments, 14) + position % block_size * argument(arguments, 15)
    return argument(arguments, 2) + at * size_of(element)


@njit
def _num_keys_of(arguments: int, i: int) -> Any:
    """Latents that token i could attend to, its own included."""
    return int32_at(argument(arguments, 4) + i * _NUM_COLUMNS * 4) + 1


@njit
def _num_chosen_of(arguments: int, i: int) -> Any:
    return int32_at(argument(arguments, 4) + (i * _NUM_COLUMNS + 2) * 4)


@njit
def _p_scores_of(arguments: int, i: int) -> Any:
    return argument(arguments, 5) + i * argument(arguments, 11) * KEYS * 4


@njit
def _score(arguments: int, item: int, p_scratch: int, element: Any) -> None:
    """Scores of some keys of a token; none where all are chosen."""
    num_heads = argument(arguments, 7)
    dim = argument(arguments, 8)
    num_chunks = argument(arguments, 11)
    size = size_of(element)
    i = item // num_chunks
    first = item % num_chunks * KEYS
    num_keys = _num_keys_of(arguments, i)
    if first >= num_keys or num_keys == _num_chosen_of(arguments, i):
        return
    p_q = argument(arguments, 0) + i * num_heads * dim * size
    for d in range(0, num_heads * dim, NUM_LANES):
        store(p_scratch + d * 4, load(p_q + d * size, element), F32_ELEMENT)
    p_weights = argument(arguments, 1) + i * num_heads * 4
    behind = argument(arguments, 9) * size
    p_scores = _p_scores_of(arguments, i)
    for key in range(first, min(first + KEYS, num_keys), _TOGETHER):
        # Behind the last key it is scored again.
        last = num_keys - 1
        p_0 = _address_of(arguments, i, key, element) + behind
        p_1 = _address_of(arguments, i, min(key + 1, last), element) + behind
        p_2 = _address_of(arguments, i, min(key + 2, last), element) + behind
        p_3 = _address_of(arguments, i, min(key + 3, last), element) + behind
        s_0 = s_1 = s_2 = s_3 = F32(0)
        for head in range(num_heads):
            a_0 = a_1 = a_2 = a_3 = splat(F32(0))
            for d in range(0, dim, NUM_LANES):
                x = load(p_scratch + (head * dim + d) * 4, F32_ELEMENT)
                a_0 = fma(x, load(p_0 + d * size, element), a_0)
                a_1 = fma(x, load(p_1 + d * size, element), a_1)
                a_2 = fma(x, load(p_2 + d * size, element), a_2)
                a_3 = fma(x, load(p_3 + d * size, element), a_3)
            weight = float32_at(p_weights + head * 4)
            s_0 += weight * max(sum_of(a_0), F32(0))
            s_1 += weight * max(sum_of(a_1), F32(0))
            s_2 += weight * max(sum_of(a_2), F32(0))
            s_3 += weight * max(sum_of(a_3), F32(0))
        put(p_scores + key * 4, s_0, F32_ELEMENT)
        put(p_scores + min(key + 1, last) * 4, s_1, F32_ELEMENT)
        put(p_scores + min(key + 2, last) * 4, s_2, F32_ELEMENT)
        put(p_scores + min(key + 3, last) * 4, s_3, F32_ELEMENT)


@njit
def _ordered(p_score: int) -> Any:
    """A whole number for a score, in the order of scores."""
    bits = int32_at(p_score)
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


@njit
def _threshold(p_scores: int, num_keys: int, num_chosen: int) -> int:
    """The `num_chosen`-th highest score, as a whole number: its bits are found from the highest."""
    threshold = -(1 << 31)
    for bit in range(31, -1, -1):
        higher = threshold + (1 << bit)
        count = 0
        for key in range(num_keys):
            count += _ordered(p_scores + key * 4) >= higher
        if count >= num_chosen:
            threshold = higher
    return threshold


@njit
def _choose(arguments: int, i: int, element: Any) -> None:
    num_keys = _num_keys_of(arguments, i)
    num_chosen = _num_chosen_of(arguments, i)
    width = argument(arguments, 9)
    row_size = width * size_of(element)
    p_out = argument(arguments, 6) + i * argument(arguments, 12) * row_size
    p_scores = _p_scores_of(arguments, i)
    threshold = 0
    num_equal = 0
    if num_chosen < num_keys:
        threshold = _threshold(p_scores, num_keys, num_chosen)
        num_equal = num_chosen
        for key in range(num_keys):
            num_equal -= _ordered(p_scores + key * 4) > threshold
    for key in range(num_keys):
        is_chosen = num_chosen == num_keys
        if not is_chosen:
            score = _ordered(p_scores + key * 4)
            is_equal = score == threshold and num_equal > 0
            num_equal -= is_equal
            is_chosen = is_equal or score > threshold
        if is_chosen:
            p_latent = _address_of(arguments, i, key, element)
            for d in range(0, width, NUM_LANES):
                at = d * size_of(element)
                store(p_out + at, load(p_latent + at, element), element)
            p_out += row_size
    if num_chosen % 2:
        # Attention reads latents in pairs.
        for d in range(0, width, NUM_LANES):
            store(p_out + d * size_of(element), splat(F32(0)), element)


def _scores(element: Any) -> Any:
    def work(arguments: int) -> None:
        size = argument(arguments, 7) * argument(arguments, 8)
        scratch = np.empty(size, np.float32)
        for i in items(arguments):
            _score(arguments, i, scratch.ctypes.data, element)

    return work


def _choices(element: Any) -> Any:
    def work(arguments: int) -> None:
        for i in items(arguments):
            _choose(arguments, i, element)

    return work


SCORES = Kernel(_scores(F32_ELEMENT), _scores(BF16_ELEMENT))
CHOICE = Kernel(_choices(F32_ELEMENT), _choices(BF16_ELEMENT))
