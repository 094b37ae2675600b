"""Tokens of the simulated executor: each follows from the KV entries before it.

An entry is the entry before it plus a hash of token and position, so one entry stands for the whole
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..executor import Int32Array
from ..request import TokenLogprobs
from ..sampling_params import SamplingParams

UInt64Array = npt.NDArray[np.uint64]
TOKEN_SALT = np.uint64(0x9E3779B97F4A7C15)
POSITION_SALT = np.uint64(0xC2B2AE3D27D4EB4F)
SEED_SALT = 0x165667B19E3779F9
CHOICE_SALT = 0x27D4EB2F165667C5
NUM_SAID_UNDER_MASK = 16
"""Allowed tokens among which a masked row draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """Draws ids uniformly from a range, and now and then the end of sequence."""

    vocab_size: int
    first_token_id: int = 0
    """Ids below are never said: a tokenizer's special tokens usually lie there."""
    eos_token_id: int | None = None
    eos_probability: float = 0.0

    def tokens(
        self,
        entries: UInt64Array,
        noise: UInt64Array,
        output_indices: Int32Array,
        eos_from: Int32Array,
    ) -> Int32Array:
        """Tokens that follow these KV entries, [S] each; no end of sequence before output index
        `eos_from`."""
        draws = mix(entries + noise + output_indices.astype(np.uint64) * POSITION_SALT)
        num_said = np.uint64(self.vocab_size - self.first_token_id)
        tokens = ((draws >> np.uint64(32)) % num_said).astype(np.int32) + np.int32(
            self.first_token_id
        )
        if self.eos_token_id is not None:
            ends = (draws & np.uint64(0xFFFFFFFF)) < np.uint64(int(self.eos_probability * 2**32))
            tokens[ends & (output_indices >= eos_from)] = self.eos_token_id
        return tokens

    def masked_tokens(
        self,
        entries: UInt64Array,
        noise: UInt64Array,
        output_indices: Int32Array,
        masks: Int32Array,
    ) -> Int32Array:
        """As `tokens`, of those that masks [S, words] allow: one of the first few, which in most
        vocabularies are single characters, so that what is matched comes to its end."""
        draws = mix(entries + noise + output_indices.astype(np.uint64) * POSITION_SALT).tolist()
        first = [_first_allowed(row) for row in np.ascontiguousarray(masks)]
        return np.array(
            [ids[draw % len(ids)] for ids, draw in zip(first, draws, strict=True)], np.int32
        )

    def logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Plausible ones: the token is the likeliest with one half, each alternative half as likely
        as the last."""
        others = (token_id + np.arange(1, num_top) - self.first_token_id) % (
            self.vocab_size - self.first_token_id
        )
        top_ids = [token_id, *(others + self.first_token_id).tolist()][:num_top]
        top_logprobs = (np.log(0.5) * np.arange(1, num_top + 1)).tolist()
        return TokenLogprobs(logprob=float(np.log(0.5)), top_ids=top_ids, top_logprobs=top_logprobs)


def _first_allowed(mask: Int32Array) -> npt.NDArray[np.intp]:
    """Up to `NUM_SAID_UNDER_MASK` tokens, the first that a mask [words] allows; most words allow
    none."""
    words = np.flatnonzero(mask)[:NUM_SAID_UNDER_MASK]
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    places, offsets = np.nonzero(bits)
    return (words[places] * 32 + offsets)[:NUM_SAID_UNDER_MASK]


def expected_tokens(
    model: SimulatedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    choice_index: int = 0,
    output_ids: Sequence[int] = (),
    max_model_len: int = 1 << 30,
    mask: Callable[[list[int]], Int32Array] | None = None,
) -> list[int]:
    """The whole answer to a prompt: `output_ids`, then what follows up to the length or a stop id,
    itself included.
    `mask` is a grammar: what may follow an answer, int32 [words]."""
    known = np.array([*prompt_ids, *output_ids], np.int32)
    entry = hashes(known, np.arange(known.size, dtype=np.int32)).sum(keepdims=True, dtype=np.uint64)
    noise = np.array([noise_of(sampling, choice_index)], np.uint64)
    eos_from = np.array([eos_from_of(sampling, model)], np.int32)
    answer = list(output_ids)
    max_tokens = min(sampling.max_tokens, max_model_len - len(prompt_ids))
    min_tokens = sampling.min_tokens if mask is None else 0
    while len(answer) < max_tokens and not (
        len(answer) > min_tokens and answer[-1] in sampling.stop_token_ids
    ):
        index = np.array([len(answer)], np.int32)
        if mask is None:
            token = model.tokens(entry, noise, index, eos_from)
        else:
            token = model.masked_tokens(entry, noise, index, mask(answer)[None])
        entry = entry + hashes(token, np.array([len(prompt_ids) + len(answer)], np.int32))
        answer.append(int(token[0]))
    return answer


def noise_of(sampling: SamplingParams, choice_index: int) -> int:
    """Noise that sets equal prompts apart; 0 if the answer is greedy."""
    if sampling.is_greedy:
        return 0
    return (sampling.seed * SEED_SALT + (choice_index + 1) * CHOICE_SALT) % 2**64


def eos_from_of(sampling: SamplingParams, model: SimulatedModel) -> int:
    return sampling.min_tokens if model.eos_token_id in sampling.min_tokens_blocked_ids else 0


def hashes(token_ids: Int32Array, positions: Int32Array) -> UInt64Array:
    return mix(
        token_ids.astype(np.uint64) * TOKEN_SALT + positions.astype(np.uint64) * POSITION_SALT
    )


def mix(x: UInt64Array) -> UInt64Array:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
