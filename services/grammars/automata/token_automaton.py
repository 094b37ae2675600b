"""The automaton of a grammar over tokens: the state after each token, and the mask of each state."""

from __future__ import annotations

import json

from .builder import LOST, Unfollowed
from .byte_classes import NUM_CLASSES
from .masks import NO_MASK, masks_of
from .schema import schema_automaton
from .vocabulary import IntArray, Vocabulary


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

    def write_mask(self, state: int, out: IntArray) -> bool:
        """Writes the mask of a state into out [words]; False where only llguidance knows it."""
        mask = int(self._masks.of_state[state])
        if self.is_off or mask == NO_MASK:
            return False
        self._masks.write(mask, out)
        return True
