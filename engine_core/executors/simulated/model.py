"""Tokens of the simulated executor: each follows from the KV entries before it.

An entry is the entry before it plus a hash of token and position, so one entry stands for the whole
sequence. Each page group has entries of its own, which differ by a constant. A token follows from
the last entry of each group or, with a window, from all entries in it; of latents from all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...executor import Int32Array
from ...request import TokenLogprobs
from ...sampling_params import SamplingParams
from .adapters import salt_of
from .edits import IdArray, SimulatedEdits
from .hashes import POSITION_SALT, UInt64Array, hashes, mix

SEED_SALT = 0x165667B19E3779F9
CHOICE_SALT = 0x27D4EB2F165667C5
GROUP_SALT = 0x8EBC6AF09C88C6E3
UNIT_SALT = 0xD6E8FEB86659FD93
RANK_SALT = np.uint64(0xA0761D6478BD642F)
NUM_SAID_UNDER_MASK = 16
"""Allowed tokens among which a masked row draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """Draws ids uniformly from a range, and now and then the end of sequence.

    All tokens are equally likely, so top-k and top-p keep a number of them: the first in an order
    that depends on the position. Greedy decoding takes the first of all; min-p keeps all.
    """

    vocab_size: int
    first_token_id: int = 0
    """Least id that is drawn: a tokenizer's special tokens usually have smaller ones."""
    eos_token_id: int | None = None
    eos_probability: float = 0.0
    windows: tuple[int, ...] = (0,)
    """Entries of each page group that a token follows from, 2 or more; 0: the last one."""
    has_latents: bool = False
    """Whether a token follows from all entries of groups without a window, not from the last
    one."""
    num_state_units: int = 0
    """Units of state layers, from each of which a token follows as well."""

    def num_seen(self, group: int) -> int:
        """Entries of a page group that a token follows from; 0: all."""
        return self.windows[group] or (0 if self.has_latents else 1)

    def seen(self, entries: UInt64Array) -> UInt64Array:
        """Sum of the entries of all page groups, and of the states, that the token behind entries
        [n] of the first group follows from, [1]."""
        total = 0
        for group in range(len(self.windows)):
            last = entries[-self.num_seen(group) :]
            total += int(last.sum(dtype=np.uint64)) + last.size * salt_of_group(group)
        for unit in range(self.num_state_units):
            total += int(entries[-1]) + salt_of_unit(unit)
        return np.array([total % 2**64], np.uint64)

    def tokens(
        self,
        entries: UInt64Array,
        noise: UInt64Array,
        output_indices: Int32Array,
        eos_from: Int32Array,
        num_kept: UInt64Array | None = None,
    ) -> Int32Array:
        """Tokens that follow these KV entries, [S] each; no end of sequence before output index
        `eos_from`. `num_kept`: number of tokens that filters keep, [S]; None: all."""
        places = entries + output_indices.astype(np.uint64) * POSITION_SALT
        draws = mix(places + noise)
        num_drawable = np.uint64(self.vocab_size - self.first_token_id)
        if num_kept is not None and (num_kept < num_drawable).any():
            ranks = (draws >> np.uint64(32)) % num_kept
            draws = np.where(num_kept < num_drawable, mix(places + ranks * RANK_SALT), draws)
        tokens = ((draws >> np.uint64(32)) % num_drawable).astype(np.int32) + np.int32(
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
        """Like `tokens`, among those that masks [S, words] allow: one of the first few, which in
        most vocabularies are single characters, so that a grammar soon comes to its end."""
        draws = mix(entries + noise + output_indices.astype(np.uint64) * POSITION_SALT).tolist()
        first = [_first_allowed(row) for row in np.ascontiguousarray(masks)]
        return np.array(
            [ids[draw % len(ids)] for ids, draw in zip(first, draws, strict=True)], np.int32
        )

    def num_kept(self, sampling: SamplingParams) -> int:
        """Number of the model's tokens that top-k and top-p keep."""
        num_tokens = self.vocab_size - self.first_token_id
        if sampling.is_greedy:
            return num_tokens
        num_kept = min(sampling.top_k or num_tokens, num_tokens)
        return min(num_kept, math.ceil(sampling.top_p * num_kept))

    def candidates(self, edits: SimulatedEdits, mask: Int32Array | None = None) -> IdArray:
        """Ids that an edited row may have: the model's and those of biases above 0, as far as a
        mask [words] allows them."""
        ids = np.arange(self.first_token_id, self.vocab_size, dtype=np.int64)
        ids = np.union1d(ids, edits.favoured())
        if mask is None:
            return ids
        allows = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
        allowed: IdArray = ids[allows[ids] == 1]
        return allowed

    def logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Makes plausible log probabilities: the token has one half, and each alternative half as
        much as the one before it."""
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
    adapter: bytes = b"",
) -> list[int]:
    """The whole answer to a prompt: `output_ids`, then what follows up to the length or a stop id,
    itself included. `adapter`: its hash. `mask` is a grammar: what may follow an answer, int32
    [words]."""
    known = np.array([*prompt_ids, *output_ids], np.int32)
    entries = np.cumsum(hashes(known, np.arange(known.size, dtype=np.int32)))
    salted = (noise_of(sampling, choice_index) + salt_of(adapter)) % 2**64
    noise = np.array([salted], np.uint64)
    eos_from = np.array([eos_from_of(sampling, model)], np.int32)
    num_kept = np.array([model.num_kept(sampling)], np.uint64)
    edits = SimulatedEdits.of(sampling, known[: len(prompt_ids)], model.first_token_id)
    answer = list(output_ids)
    max_tokens = min(sampling.max_tokens, max_model_len - len(prompt_ids))
    min_tokens = sampling.min_tokens if mask is None else 0
    while len(answer) < max_tokens and not (
        len(answer) > min_tokens and answer[-1] in sampling.stop_token_ids
    ):
        index = np.array([len(answer)], np.int32)
        entry = model.seen(entries)
        if mask is None:
            token = model.tokens(entry, noise, index, eos_from, num_kept)
        else:
            token = model.masked_tokens(entry, noise, index, mask(answer)[None])
        if edits is not None:
            candidates = model.candidates(edits, None if mask is None else mask(answer))
            outputs = np.array(answer, np.int64)
            token[0] = edits.token(int(token[0]), candidates, entry, noise, outputs)
        added = hashes(token, np.array([len(prompt_ids) + len(answer)], np.int32))
        entries = np.append(entries, entries[-1] + added)
        answer.append(int(token[0]))
    return answer


def salt_of_group(group: int) -> int:
    """Number that is added to the cache entries of a page group, so that groups differ; 0 for the
    first group."""
    return group * GROUP_SALT % 2**64


def salt_of_unit(unit: int) -> int:
    """Difference of a unit's state from the sum of the hashes of the tokens before it."""
    return (unit + 1) * UNIT_SALT % 2**64


def noise_of(sampling: SamplingParams, choice_index: int) -> int:
    """Noise that sets equal prompts apart; 0 if the answer is greedy."""
    if sampling.is_greedy:
        return 0
    return (sampling.seed * SEED_SALT + (choice_index + 1) * CHOICE_SALT) % 2**64


def eos_from_of(sampling: SamplingParams, model: SimulatedModel) -> int:
    return sampling.min_tokens if model.eos_token_id in sampling.min_tokens_blocked_ids else 0
