"""Tokens where one byte alone may come. llguidance then allows only the next token of the tokenizer's
spelling of all bytes that are forced, as far as no other token spells their end and goes on."""

from __future__ import annotations

import numpy as np

from .builder import ByteAutomaton
from .byte_classes import CLASS_OF_BYTE, CLASS_SIZES
from .vocabulary import NO_TOKEN, Vocabulary

UNKNOWN = -2
"""Stands for a token that depends on bytes which the automaton does not know."""
MAX_KEPT = 4096
"""Tokens that are kept of an automaton, by state and last token."""
MAX_RUN = 256
"""Most bytes of a run of forced bytes that is spelled here."""
_NUM_LAST = 4
"""Last tokens of a spelling, whose text may be spelled otherwise."""
_BYTE_OF_CLASS = np.argsort(CLASS_OF_BYTE, kind="stable")[np.cumsum(CLASS_SIZES) - CLASS_SIZES]


class Spelling:
    def __init__(self, automaton: ByteAutomaton, vocabulary: Vocabulary) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        has_one = (automaton.steps >= 0) @ CLASS_SIZES == 1
        self._is_forced = has_one & ~automaton.accepts & automaton.is_exact
        self._kept: dict[tuple[int, int], int] = {}
        self._runs: dict[int, tuple[bytes, int]] = {}
        self._num_open_of: dict[tuple[bytes, int], int] = {}

    def token(self, state: int, last_token: int) -> int:
        """The only token that a state allows behind another one (`NO_TOKEN`: at the start of an
        answer); `NO_TOKEN` where that is not decided by spelling, or `UNKNOWN`."""
        if not self._is_forced[state] or not self._vocabulary.is_canonical:
            return NO_TOKEN
        found = self._kept.get((state, last_token))
        if found is None:
            if len(self._kept) == MAX_KEPT:
                return UNKNOWN
            found = self._kept[state, last_token] = self._first(state, last_token)
        return found

    def _first(self, state: int, last_token: int) -> int:
        forced, end = self._run(state)
        if len(forced) > MAX_RUN:
            return UNKNOWN
        texts = self._vocabulary.texts
        before = b"" if last_token == NO_TOKEN else texts[last_token]
        tokens = self._vocabulary.tokenize(before + forced)
        if before and tokens[0] == last_token:
            del tokens[0]
        elif before:
            tokens = self._vocabulary.tokenize(forced)
        ending = b"".join(texts[token] for token in tokens[-_NUM_LAST:])
        num_open = self._num_open(ending, end)
        if num_open == UNKNOWN:
            return UNKNOWN
        while tokens and num_open > 0:
            num_open -= len(texts[tokens.pop()])
        return tokens[0] if tokens else NO_TOKEN

    def _run(self, state: int) -> tuple[bytes, int]:
        """The bytes that a state forces, `MAX_RUN` + 1 at most, and the state behind them."""
        if (found := self._runs.get(state)) is not None:
            return found
        forced = bytearray()
        end = state
        while self._is_forced[end] and len(forced) <= MAX_RUN:
            byte_class = int(self._automaton.steps[end].argmax())
            forced.append(_BYTE_OF_CLASS[byte_class])
            end = int(self._automaton.steps[end, byte_class])
        found = self._runs[state] = bytes(forced), end
        return found

    def _num_open(self, ending: bytes, state: int) -> int:
        """Bytes at the end of a spelling that a longer token may begin with, or `UNKNOWN`."""
        found = self._num_open_of.get((ending, state))
        if found is None:
            found = 0
            for start in range(len(ending)):
                goes_on = self._goes_on(ending[start:], state)
                if goes_on is not False:
                    found = len(ending) - start if goes_on else UNKNOWN
                    break
            self._num_open_of[ending, state] = found
        return found

    def _goes_on(self, text: bytes, state: int) -> bool | None:
        """Whether a longer token begins with the text and may go on from the state; None where
        that is not known."""
        trie = self._vocabulary.trie
        node = 0
        for byte_class in text.translate(CLASS_OF_BYTE.tobytes()):
            if (child := trie.child(node, byte_class)) is None:
                return False
            node = child
        waiting = [(node, state)]
        while waiting:
            node, state = waiting.pop()
            if not self._automaton.is_exact[state]:
                return None
            for child in range(trie.first[node], trie.first[node + 1]):
                after = int(self._automaton.steps[state, trie.byte_class[child]])
                if after >= 0:
                    if trie.token[child] != NO_TOKEN and self._automaton.is_exact[after]:
                        return True
                    waiting.append((child, after))
        return False
