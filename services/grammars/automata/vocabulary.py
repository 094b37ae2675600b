"""The texts of a tokenizer's tokens as a trie, and what each does to a JSON string."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from .byte_classes import CLASS_OF_BYTE, NUM_CLASSES
from .text_states import BETWEEN, NUM_TEXT_STATES, QUOTE, TEXT_STEPS

IntArray = npt.NDArray[np.int32]
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Trie:
    """Nodes in breadth-first order, the root first; children of node n are nodes
    first[n]..first[n + 1] - 1."""

    first: IntArray
    byte_class: npt.NDArray[np.uint8]
    token: IntArray
    """Token that ends at the node, or `NO_TOKEN`."""
    of_class: IntArray
    """Children of the root of class c are by_class[of_class[c]]..by_class[of_class[c + 1] - 1]."""
    by_class: IntArray

    def child(self, node: int, byte_class: int) -> int | None:
        """Child of a node by a class of one byte."""
        children = self.byte_class[self.first[node] : self.first[node + 1]]
        found = np.flatnonzero(children == byte_class)
        return int(self.first[node] + found[0]) if found.size else None


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Tokens that may come in one state of a string's text."""

    inside: IntArray
    """Tokens that stay within the string."""
    num_needed: IntArray
    """Characters that each of them completes or begins, in ascending order."""
    ending: IntArray
    """Tokens that close the string."""
    num_chars: IntArray
    """Characters that each of these completes before the quote."""
    rest: IntArray
    """Index of the text behind the quote in `Vocabulary.rests`."""
    levels: IntArray
    """The different numbers of characters of both."""


class DuplicateTokens(Exception):
    """Two tokens have the same text; a node of the trie has one token."""


class Vocabulary:
    """Special tokens have no text."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        """Raises `DuplicateTokens`."""
        self.num_words = -(-tokenizer.vocab_size // 32)
        self.eos_ids = tokenizer.eos_tokens
        self.is_canonical = tokenizer.is_canonical
        """Whether llguidance knows the tokenizer's spelling of a text."""
        self.tokenize = tokenizer.tokenize_bytes
        self.texts = [
            b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
            for token in range(tokenizer.vocab_size)
        ]
        if len(set(self.texts) - {b""}) < sum(map(bool, self.texts)):
            raise DuplicateTokens
        self.classes_of = [text.translate(CLASS_OF_BYTE.tobytes()) for text in self.texts]
        """Classes of the bytes of each token."""
        lengths = np.array([len(text) for text in self.texts])
        starts = np.cumsum(lengths) - lengths
        raw = np.frombuffer(b"".join(self.texts), np.uint8)
        self.trie = _trie(raw, starts, lengths)
        rests: dict[bytes, int] = {}
        self.of_text = [
            self._run(state, CLASS_OF_BYTE[raw], starts, lengths, rests)
            for state in range(NUM_TEXT_STATES)
        ]
        """By the state of the text."""
        self.rests = list(rests)
        """Classes of the bytes behind a quote that closes a string, as tokens have them."""

    def _run(
        self,
        start: int,
        raw_classes: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.intp],
        lengths: npt.NDArray[np.intp],
        rests: dict[bytes, int],
    ) -> TextTokens:
        steps, chars = TEXT_STEPS
        tokens = np.flatnonzero(lengths)
        states = np.full(tokens.size, start)
        counts = np.zeros(tokens.size, np.int32)
        inside = list[IntArray]()
        ending = list[IntArray]()
        place = 0
        while tokens.size:
            byte_class = raw_classes[starts[tokens] + place]
            closes = (byte_class == QUOTE) & (states == BETWEEN)
            ends = np.full(closes.sum(), place + 1)
            ending.append(np.stack([tokens[closes], counts[closes], ends]))
            counts = counts + chars[states, byte_class]
            states = steps[states, byte_class].astype(np.intp)
            place += 1
            is_over = (states >= 0) & (lengths[tokens] == place)
            needed = counts + (states != BETWEEN)
            inside.append(np.stack([tokens[is_over], needed[is_over]]))
            goes_on = (states >= 0) & ~is_over
            tokens, states, counts = tokens[goes_on], states[goes_on], counts[goes_on]
        token, needed = np.concatenate(inside, axis=1).astype(np.int32)
        order = np.argsort(needed, kind="stable")
        closing, num_chars, end = np.concatenate(ending, axis=1).astype(np.int32)
        rest = [
            rests.setdefault(self.classes_of[token][end:], len(rests))
            for token, end in zip(closing.tolist(), end.tolist(), strict=True)
        ]
        return TextTokens(
            inside=token[order],
            num_needed=needed[order],
            ending=closing,
            num_chars=num_chars,
            rest=np.array(rest, np.int32),
            levels=np.union1d(needed, num_chars),
        )


def _trie(
    raw: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp], lengths: npt.NDArray[np.intp]
) -> Trie:
    """Level by level: the nodes of a level are its different pairs of a parent and a byte."""
    tokens = np.flatnonzero(lengths)
    parents = np.zeros(tokens.size, np.int64)
    num_nodes = 1
    firsts = [np.zeros(0, np.int64)]
    byte_classes = [np.zeros(1, np.uint8)]
    ends = [np.full(1, NO_TOKEN, np.int64)]
    level_start = 0
    place = 0
    while tokens.size:
        keys, node_of = np.unique(parents * 256 + raw[starts[tokens] + place], return_inverse=True)
        num_parents = num_nodes - level_start
        counts = np.bincount(keys // 256 - level_start, minlength=num_parents)
        firsts.append(num_nodes + np.cumsum(counts) - counts)
        byte_classes.append(CLASS_OF_BYTE[keys % 256])
        place += 1
        is_over = lengths[tokens] == place
        token = np.full(keys.size, NO_TOKEN)
        token[node_of[is_over]] = tokens[is_over]
        ends.append(token)
        parents = num_nodes + node_of[~is_over]
        tokens = tokens[~is_over]
        level_start = num_nodes
        num_nodes += keys.size
    firsts.append(np.full(num_nodes - level_start + 1, num_nodes))
    of_root = byte_classes[1]
    return Trie(
        np.concatenate(firsts).astype(np.int32),
        np.concatenate(byte_classes),
        np.concatenate(ends).astype(np.int32),
        np.searchsorted(np.sort(of_root), np.arange(NUM_CLASSES + 1)).astype(np.int32),
        (1 + np.argsort(of_root, kind="stable")).astype(np.int32),
    )
