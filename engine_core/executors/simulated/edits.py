"""Edits of logits for the simulated model, whose tokens all have the logit 0.

The token that the model draws by itself has the largest noise and stands where no edit lowers it,
so that a neutral field changes no answer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...executor import Int32Array
from ...sampling_params import SamplingParams
from .hashes import POSITION_SALT, TOKEN_SALT, UInt64Array, mix

Float64Array = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]
ORDER_SALT = np.uint64(0xD6E8FEB86659FD93)


class SimulatedEdits:
    """Choice of one request's tokens: its biases, penalties, allowed, blocked and banned tokens,
    and its filters after these."""

    def __init__(self, sampling: SamplingParams, prompt_ids: Int32Array) -> None:
        self._sampling = sampling
        self._prompt_ids = prompt_ids
        self._allowed = np.array(sorted(sampling.allowed_token_ids), np.int64)
        biased = sorted(sampling.logit_bias)
        self._biased = np.array(biased, np.int64)
        self._biases = np.array([sampling.logit_bias[token_id] for token_id in biased])

    @classmethod
    def of(
        cls, sampling: SamplingParams, prompt_ids: Int32Array, first_token_id: int
    ) -> SimulatedEdits | None:
        """Edits of a request; None where its tokens are drawn without any. Ids below
        `first_token_id` are never drawn, so they need not be blocked."""
        blocked = any(token_id >= first_token_id for token_id in sampling.min_tokens_blocked_ids)
        lists = sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words
        if not (any(lists) or blocked or sampling.has_penalties):
            return None
        return cls(sampling, prompt_ids)

    def token(
        self,
        drawn: int,
        candidates: IdArray,
        entry: UInt64Array,
        noise: UInt64Array,
        outputs: IdArray,
    ) -> int:
        """The one of `candidates`, ascending ids, that follows `outputs`. `drawn`: the token that
        the model draws without edits; `entry` [1] is the last KV entry, `noise` [1] the row's."""
        ids = np.union1d(candidates, [drawn])
        if self._allowed.size:
            ids = self._allowed
        logits = self._edited(ids, outputs)
        salt = entry + np.array([outputs.size], np.uint64) * POSITION_SALT
        order = _led_by(drawn, ids, _uniform(salt + ORDER_SALT, ids))
        if self._sampling.is_greedy:
            return int(ids[np.lexsort((order, logits))[-1]])
        scaled = self._filtered(logits / self._sampling.temperature, order)
        gumbel = _led_by(drawn, ids, -np.log(-np.log(_uniform(salt + noise, ids))))
        return int(ids[np.argmax(scaled + gumbel)])

    def favoured(self) -> IdArray:
        """Ids with a positive bias."""
        return self._biased[self._biases > 0]

    def _edited(self, ids: IdArray, outputs: IdArray) -> Float64Array:
        """Logits of ascending ids."""
        sampling = self._sampling
        logits = np.zeros(ids.size)
        is_biased = np.isin(self._biased, ids)
        logits[np.searchsorted(ids, self._biased[is_biased])] = self._biases[is_biased]
        if sampling.has_penalties:
            counts = np.bincount(outputs, minlength=int(ids[-1]) + 1)[ids]
            is_seen = (counts > 0) | np.isin(ids, self._prompt_ids)
            factor = np.where(is_seen, sampling.repetition_penalty, 1.0)
            logits = np.where(logits > 0, logits / factor, logits * factor)
            logits -= sampling.frequency_penalty * counts
            logits -= sampling.presence_penalty * (counts > 0)
        logits[np.isin(ids, self._banned(outputs))] = -np.inf
        return logits

    def _banned(self, outputs: IdArray) -> list[int]:
        sampling = self._sampling
        output_ids = outputs.tolist()
        banned = [
            word[-1]
            for word in sampling.bad_words
            if len(word) == 1 or output_ids[-(len(word) - 1) :] == list(word[:-1])
        ]
        if len(output_ids) < sampling.min_tokens:
            banned += sampling.min_tokens_blocked_ids
        return banned

    def _filtered(self, logits: Float64Array, order: Float64Array) -> Float64Array:
        """The logits that top-k, top-p and min-p keep; of equal ones, those first in order."""
        sampling = self._sampling
        ranked = np.lexsort((order, logits))[::-1]
        weights = np.exp(logits[ranked] - logits[ranked[0]])
        is_kept = weights >= sampling.min_p
        if sampling.top_k:
            is_kept[sampling.top_k :] = False
        weights *= is_kept
        before = np.cumsum(weights) - weights
        is_kept &= before < sampling.top_p * weights.sum()
        kept = np.full(logits.size, -np.inf)
        kept[ranked[is_kept]] = logits[ranked[is_kept]]
        return kept


def _uniform(salt: UInt64Array, ids: IdArray) -> Float64Array:
    """A number between 0 and 1 for each id."""
    draws = mix(mix(salt) + ids.astype(np.uint64) * TOKEN_SALT)
    return ((draws >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def _led_by(drawn: int, ids: IdArray, values: Float64Array) -> Float64Array:
    """The values with the largest one at `drawn`, if it is among the ids: the two places are
    swapped."""
    place = int(np.searchsorted(ids, drawn))
    if place < ids.size and ids[place] == drawn:
        largest = int(np.argmax(values))
        values[[place, largest]] = values[[largest, place]]
    return values
