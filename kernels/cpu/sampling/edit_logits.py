"""Edits logits on a CPU as `edit_logits` does, to the bit: all positions of one row of the request
table at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types

from ...sampling import edit_logits as packed
from ..compiler.machine_code import compile_function

Int32Array = npt.NDArray[np.int32]
# Words of the header as whole numbers, which numba reads.
NUM_PROMPT = packed.NUM_PROMPT.value
MIN_TOKENS = packed.MIN_TOKENS.value
HAS_PENALTIES = packed.HAS_PENALTIES.value
REPETITION = packed.REPETITION.value
PRESENCE = packed.PRESENCE.value
FREQUENCY = packed.FREQUENCY.value
NUM_BIASES = packed.NUM_BIASES.value
BIASES = packed.BIASES.value
NUM_BLOCKED = packed.NUM_BLOCKED.value
BLOCKED = packed.BLOCKED.value
NUM_WORDS = packed.NUM_WORDS.value
WORDS = packed.WORDS.value
ALLOWED = packed.ALLOWED.value
IN_PROMPT = packed.IN_PROMPT.value
_FORBIDDEN = np.float32(-np.inf)
_ONE = np.float32(1)


def edit_row(
    logits: torch.Tensor, edits: Int32Array, output_index: int, output_ids: Int32Array
) -> None:
    """Edits logits float32 [P, V] of one row's consecutive positions in place. edits: packed;
    output_index: the first position's; output_ids [n]: the outputs before the last position."""
    _compiled()(logits.numpy(), edits, edits.view(np.float32), output_index, output_ids)


def _edit_row(logits: Any, words: Any, floats: Any, output_index: int, output_ids: Any) -> None:
    num_positions, vocab_size = logits.shape
    counts = np.zeros(vocab_size if words[HAS_PENALTIES] else 0, np.int32)
    num_counted = 0
    for j in range(num_positions):
        row = logits[j]
        num_outputs = len(output_ids) - num_positions + 1 + j
        if words[ALLOWED]:
            _allow(row, words[words[ALLOWED] :])
        for k in range(words[NUM_BIASES]):
            row[words[words[BIASES] + k]] += floats[words[BIASES] + words[NUM_BIASES] + k]
        if words[HAS_PENALTIES]:
            while num_counted < num_outputs:
                counts[output_ids[num_counted]] += 1
                num_counted += 1
            _penalize(row, counts, words, floats)
        if output_index + j < words[MIN_TOKENS]:
            for k in range(words[NUM_BLOCKED]):
                row[words[words[BLOCKED] + k]] = _FORBIDDEN
        _forbid_words(row, words, output_ids[:num_outputs])


@njit
def _is_in(tokens: Any, token: int) -> Any:
    return (tokens[token >> 5] >> (token & 31)) & 1 != 0


@njit
def _allow(row: Any, allowed: Any) -> None:
    for token in range(len(row)):
        if not _is_in(allowed, token):
            row[token] = _FORBIDDEN


@njit
def _penalize(row: Any, counts: Any, words: Any, floats: Any) -> None:
    """Applies penalties in float32; each operation is rounded."""
    repetition = floats[REPETITION]
    presence = floats[PRESENCE]
    frequency = floats[FREQUENCY]
    in_prompt = words[words[IN_PROMPT] :]
    for token in range(len(row)):
        x = row[token]
        count = counts[token]
        if repetition != _ONE and (count > 0 or _is_in(in_prompt, token)):
            x = x / repetition if x > 0 else x * repetition
        x -= frequency * np.float32(count)
        row[token] = x - presence * np.float32(count > 0)


@njit
def _forbid_words(row: Any, words: Any, outputs: Any) -> None:
    num_words = words[NUM_WORDS]
    for k in range(num_words):
        last = words[words[WORDS] + k] - 1
        num_before = words[words[WORDS] + num_words + k] - 1
        matches = num_before <= len(outputs)
        for i in range(num_before):
            matches = matches and words[last - 1 - i] == outputs[len(outputs) - 1 - i]
        if matches:
            row[words[last]] = _FORBIDDEN


@cache
def _compiled() -> Callable[..., None]:
    numbers = types.Array(types.float32, 2, "C")
    integers = types.Array(types.int32, 1, "C")
    floats = types.Array(types.float32, 1, "C")
    return compile_function(_edit_row, types.void(numbers, integers, floats, types.int64, integers))
