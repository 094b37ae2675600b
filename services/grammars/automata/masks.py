"""Masks of the states of a byte automaton: the tokens whose texts it has a way for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .builder import DEAD, LOST, ByteAutomaton, Text, Unfollowed
from .text_states import NUM_TEXT_STATES
from .vocabulary import NO_TOKEN, IntArray, TextTokens, Vocabulary

NO_MASK = -1
"""Mask of states that llguidance is asked about."""
MAX_BYTES = 32 << 20
MAX_VISITED = 8_000_000
"""Nodes of the vocabulary's trie that all states visit together."""
_FEW_CLASSES = 16
_INEXACT = -2
"""Stands for the tokens that lead to an inexact state: llguidance knows which of them may come."""
Pairs = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]


@dataclass(slots=True)
class Masks:
    """Masks of an automaton's states: whole ones, int32 [words], and the others by their words that
    are not zero."""

    of_state: IntArray
    """[states]: row m of `whole`, `len(whole)` + m for the m-th of the others, or `NO_MASK`."""
    whole: IntArray
    """[masks, words]."""
    first: IntArray
    """The m-th of the others has words first[m]..first[m + 1] - 1 of `places` and `words`."""
    places: IntArray
    words: IntArray

    def write(self, mask: int, out: IntArray) -> None:
        """Writes a mask into out [words]."""
        if mask < len(self.whole):
            out[:] = self.whole[mask]
            return
        number = mask - len(self.whole)
        some = slice(self.first[number], self.first[number + 1])
        out[:] = 0
        out[self.places[some]] = self.words[some]

    @property
    def num_bytes(self) -> int:
        return sum(
            each.nbytes for each in (self.of_state, self.whole, self.first, self.places, self.words)
        )


def masks_of(automaton: ByteAutomaton, vocabulary: Vocabulary) -> Masks:
    """Raises `Unfollowed` where they take too much memory."""
    has_mask = (automaton.steps >= 0).any(axis=1) | automaton.accepts
    has_mask &= automaton.is_exact
    of_state = np.full(len(automaton.steps), NO_MASK, np.int32)
    texts = _TextMasks(automaton, vocabulary, has_mask, of_state)
    for text in automaton.texts:
        texts.fill(text)
        has_mask[text.states] = False
    others = _mask_others(automaton, vocabulary, has_mask, of_state, len(texts.masks))
    whole = np.array(texts.masks, np.int32).reshape(-1, vocabulary.num_words)
    return Masks(of_state, whole, *others)


class _TextMasks:
    """Masks of the states of strings: the tokens within a string, and those that end it and whose
    rest may follow it."""

    def __init__(
        self,
        automaton: ByteAutomaton,
        vocabulary: Vocabulary,
        has_mask: npt.NDArray[np.bool_],
        of_state: IntArray,
    ) -> None:
        self.masks = list[IntArray]()
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._has_mask = has_mask
        self._of_state = of_state
        self._found: dict[tuple[object, ...], int] = {}

    def fill(self, text: Text) -> None:
        after = np.array([self._after(text.end, rest) for rest in self._vocabulary.rests])
        if (after == LOST).any():
            return
        may_follow = after >= 0
        key = may_follow.tobytes()
        for number in np.flatnonzero(self._has_mask[text.states]).tolist():
            count, state = divmod(number, NUM_TEXT_STATES)
            tokens = self._vocabulary.of_text[state]
            room = tokens.levels.size
            if text.most is not None:
                room = int(np.searchsorted(tokens.levels, text.most - count, "right"))
            missing = int(np.searchsorted(tokens.levels, text.least - count))
            same = state, room, missing, key
            if same not in self._found:
                self._found[same] = len(self.masks)
                self.masks.append(self._mask(tokens, room, missing, may_follow))
                if 4 * self._vocabulary.num_words * len(self.masks) > MAX_BYTES:
                    raise Unfollowed("its masks take too much memory")
            self._of_state[text.start + number] = self._found[same]

    def _after(self, state: int, byte_classes: bytes) -> int:
        for byte_class in byte_classes:
            state = int(self._automaton.steps[state, byte_class])
            if state == DEAD or not self._automaton.is_exact[state]:
                return min(state, LOST)
        return state

    def _mask(
        self, tokens: TextTokens, room: int, missing: int, may_follow: npt.NDArray[np.bool_]
    ) -> IntArray:
        """Mask where texts up to levels[room - 1] characters fit, and a string may end from
        levels[missing] characters on."""
        bits = np.zeros(32 * self._vocabulary.num_words, np.bool_)
        most = tokens.levels[room - 1] if room else -1
        bits[tokens.inside[: np.searchsorted(tokens.num_needed, most, "right")]] = True
        fits = may_follow[tokens.rest] & (tokens.num_chars <= most)
        fits &= tokens.num_chars >= (
            tokens.levels[missing] if missing < tokens.levels.size else most + 1
        )
        bits[tokens.ending[fits]] = True
        mask: IntArray = np.packbits(bits, bitorder="little").view(np.int32)
        return mask


def _mask_others(
    automaton: ByteAutomaton,
    vocabulary: Vocabulary,
    has_mask: npt.NDArray[np.bool_],
    of_state: IntArray,
    num_before: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """Masks of the other states, by their words."""
    sources = np.flatnonzero(has_mask)
    # Within patterns a state may lead to most of the trie.
    is_wide = (automaton.steps[sources] >= 0).sum(axis=1) > _FEW_CLASSES
    num_words = [np.zeros(0, np.intp)]
    places = [np.zeros(0, np.int32)]
    words = [np.zeros(0, np.int32)]
    num_left = MAX_VISITED
    for some in (*_parts(sources[~is_wide], 4096), *_parts(sources[is_wide], 16)):
        pairs, num_visited = _allowed(automaton, vocabulary, some)
        num_left -= num_visited
        if num_left < 0:
            raise Unfollowed("its masks take too long to find")
        known, counts, *found = _words_of(pairs, some.size, vocabulary.num_words)
        of_state[some[known]] = num_before + sum(map(len, num_words)) + np.arange(known.size)
        num_words.append(counts)
        places.append(found[0])
        words.append(found[1])
    first = np.cumsum(np.concatenate([[0], *num_words])).astype(np.int32)
    return first, np.concatenate(places), np.concatenate(words)


def _parts(sources: npt.NDArray[np.intp], size: int) -> Iterator[npt.NDArray[np.intp]]:
    return (sources[start : start + size] for start in range(0, sources.size, size))


def _words_of(
    pairs: Pairs, num_sources: int, num_words: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], IntArray, IntArray]:
    """Sources that have a mask, the number of words of each that are not zero, and these words'
    places and values."""
    index, token = pairs
    has_mask = np.ones(num_sources, np.bool_)
    has_mask[index[token == _INEXACT]] = False
    keep = has_mask[index]
    keys = np.sort(index[keep] * (32 * num_words) + token[keep])
    begins = np.flatnonzero(np.diff(keys >> 5, prepend=-1))
    bits = np.left_shift(1, keys & 31, dtype=np.int64)
    words = np.bitwise_or.reduceat(bits, begins) if begins.size else bits
    owners, places = np.divmod(keys[begins] >> 5, num_words)
    counts = np.bincount(owners, minlength=num_sources)[has_mask]
    return (
        np.flatnonzero(has_mask),
        counts,
        places.astype(np.int32),
        words.astype(np.uint32).view(np.int32),
    )


def spread(counts: npt.NDArray[Any]) -> Pairs:
    """Index of each of counts[i] parts of element i, and the number of the part in it."""
    of = np.repeat(np.arange(counts.size), counts)
    return of, np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)


def _allowed(
    automaton: ByteAutomaton, vocabulary: Vocabulary, sources: npt.NDArray[np.intp]
) -> tuple[Pairs, int]:
    """Pairs of a source's index and a token that it allows, or `_INEXACT`, and the number of nodes
    that were visited."""
    trie = vocabulary.trie
    steps = automaton.steps
    eos = np.array(vocabulary.eos_ids, np.intp)
    ends = np.flatnonzero(automaton.accepts[sources])
    found = [(np.repeat(ends, eos.size), np.tile(eos, ends.size))]
    index, byte_class = np.nonzero(steps[sources] >= 0)
    # A state has few ways, while the root has a child for each byte.
    of, place = spread(np.diff(trie.of_class)[byte_class])
    node = trie.by_class[trie.of_class[byte_class][of] + place]
    index = index[of]
    state = steps[sources[index], byte_class[of]]
    num_visited = 0
    while index.size:
        num_visited += index.size
        is_exact = automaton.is_exact[state]
        token = np.where(is_exact, trie.token[node], _INEXACT)
        is_one = token != NO_TOKEN
        found.append((index[is_one], token[is_one]))
        parents = np.flatnonzero(is_exact & (trie.first[node + 1] > trie.first[node]))
        index, node, state = index[parents], node[parents], state[parents]
        of, place = spread(trie.first[node + 1] - trie.first[node])
        child = trie.first[node][of] + place
        after = steps[state[of], trie.byte_class[child]]
        lives = after >= 0
        index, node, state = index[of[lives]], child[lives], after[lives]
    indices, tokens = zip(*found, strict=True)
    return (np.concatenate(indices), np.concatenate(tokens)), num_visited
