"""Answers written by lot under a grammar's masks, as a model without any sense would write them."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from headwater.services.grammars.check import verdict_on
from headwater.services.grammars.grammars import check, fill, grammars_of
from headwater.services.text.model import TextModel

MAX_FREE_TOKENS = 40
MAX_TOKENS = 400
CLOSING = '"@}],n1tf:[{'
"""What brings an answer to its end, first of all."""


class Walker:
    """Takes allowed tokens by lot; past some tokens it takes what brings the answer to an end."""

    def __init__(self, model: TextModel) -> None:
        self._grammars = grammars_of(model.folder)
        self._model = model
        self._mask = np.zeros(self._grammars.num_words, np.int32)
        encode = model.tokenizer.encode
        self._last = [
            *model.eos_token_ids,
            *(encode(char, add_special_tokens=False)[0] for char in CLOSING),
        ]

    def verdict(self, grammar: str) -> str | None:
        """Reason of the processor against the grammar."""
        return verdict_on(self._grammars, grammar)

    def answer(self, grammar: str, dice: random.Random) -> str | None:
        """None where it does not come to an end. Raises `GrammarError` at a dead end, too."""
        matcher = self._grammars.compile(grammar)
        written: list[int] = []
        while not matcher.is_stopped() and len(written) < MAX_TOKENS:
            fill(matcher, self._mask)
            written.append(self._next(dice, ends=len(written) > MAX_FREE_TOKENS))
            matcher.consume_token(written[-1])
            check(matcher)
        if not matcher.is_stopped():
            return None
        return self._model.tokenizer.decode(
            written[:-1] if written[-1] in self._model.eos_token_ids else written
        )

    def answers(self, grammar: str, count: int) -> set[str | None]:
        """Answers of as many walks."""
        return {self.answer(grammar, random.Random(seed)) for seed in range(count)}

    def takes(self, grammar: str, text: str) -> bool:
        """Whether the text is an answer."""
        matcher = self._grammars.compile(grammar)
        token_ids = self._model.tokenizer.encode(text, add_special_tokens=False)
        taken = matcher.try_consume_tokens(token_ids)
        return taken == len(token_ids) and matcher.is_accepting()

    def begins(self, grammar: str, text: str) -> bool:
        """Whether the text begins an answer."""
        token_ids = self._model.tokenizer.encode(text, add_special_tokens=False)
        return self._grammars.compile(grammar).try_consume_tokens(token_ids) == len(token_ids)

    def _next(self, dice: random.Random, *, ends: bool) -> int:
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        if (
            ends
            and (last := next((token for token in self._last if bits[token]), None)) is not None
        ):
            return last
        allowed = np.flatnonzero(bits)
        return int(allowed[dice.randrange(len(allowed))])


def one_grammar(**fields: Any) -> str:
    """A grammar in llguidance's format: `lark_grammar`, or `json_schema`."""
    return json.dumps({"grammars": [fields]})
