"""The automaton of a grammar over tokens: the state after each token, and the mask of each state."""

from __future__ import annotations

import json

import numpy as np

from .builder import LOST, Unfollowed
from .byte_classes import NUM_CLASSES
from .masks import NO_MASK, masks_of
from .schema import schema_automaton
from .spelling import UNKNOWN, Spelling
from .vocabulary import NO_TOKEN, IntArray, Vocabulary


class TokenAutomaton:
    """Its masks equal llguidance's, which stays the judge of every token."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        """`grammar` is in llguidance's format. Raises `Unfollowed`."""
        match json.loads(grammar)["grammars"]:
            case [{"json_schema": schema}]:
                automaton = schema_automaton(schema)
            case _:
                raise Unfollowed("it is more than one JSON Schema")
        self.start = automaton.start
        self.is_off = False
        """Whether llguidance has disagreed with it."""
        self._classes_of = vocabulary.classes_of
        self._steps = automaton.steps.reshape(-1).data
        self._spelling = Spelling(automaton, vocabulary)
        self._masks = masks_of(automaton, vocabulary)
        self.num_bytes = automaton.steps.nbytes + self._masks.num_bytes

    def after(self, state: int, token_ids: list[int]) -> int:
        """The state after these tokens."""
        steps = self._steps
        for token_id in token_ids:
            for byte_class in self._classes_of[token_id]:
                state = steps[state * NUM_CLASSES + byte_class]
                if state <= LOST:
                    return LOST
        return state

    def write_mask(self, state: int, last_token: int, out: IntArray) -> bool:
        """Writes the mask of a state behind a token (`NO_TOKEN`: at the start) into out [words];
        False where only llguidance knows it."""
        token = self._spelling.token(state, last_token)
        mask = int(self._masks.of_state[state])
        if self.is_off or token == UNKNOWN or (token == NO_TOKEN and mask == NO_MASK):
            return False
        if token == NO_TOKEN:
            self._masks.write(mask, out)
        else:
            out[:] = 0
            out[token >> 5] = np.uint32(1 << (token & 31)).astype(np.int32)
        return True
