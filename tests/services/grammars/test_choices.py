"""Grammars of choices, up to as many as a request may have."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.check import verdict_on
from headwater.services.grammars.grammars import Grammars, fill, grammars_of
from headwater.services.grammars.lark import alternatives
from headwater.services.grammars.structured_output import MAX_CHOICES, grammar_of
from headwater.services.text.model import TextModel


@pytest.fixture(scope="module")
def grammars(demo_folder: Path) -> Grammars:
    return grammars_of(demo_folder)


def grammar_of_choices(choices: list[str]) -> str:
    return grammar_of(StructuredOutput(choice=StructuredOutput.Choices(choices=choices)), {})


def long_words(model: TextModel, count: int) -> list[str]:
    """The vocabulary's longest words: a mask takes most where many tokens may come next."""
    spelled = [
        token.decode()
        for token in model.tokenizer.table.bytes_of
        if token.isascii() and token.isalpha()
    ]
    return sorted(spelled, key=len, reverse=True)[:count]


def mask_seconds(grammars: Grammars, grammar: str) -> float:
    """CPU seconds of the first mask."""
    matcher = grammars.compile(grammar)
    mask = np.zeros(grammars.num_words, np.int32)
    began = time.thread_time()
    fill(matcher, mask)
    return time.thread_time() - began


def test_an_answer_may_have_4096_choices(grammars: Grammars, demo_model: TextModel) -> None:
    choices = [f"item {i}" for i in range(MAX_CHOICES)]
    grammar = grammar_of_choices(choices)
    assert verdict_on(grammars, grammar) is None
    for text, is_one in (
        ("item 0", True),
        ("item 409", True),
        ("item 4095", True),
        ("item 4096", False),
    ):
        matcher = grammars.compile(grammar)
        token_ids = demo_model.tokenizer.encode(text, add_special_tokens=False)
        assert (
            matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
        ) == is_one, text


def test_4096_choices_of_the_longest_words_are_taken(
    grammars: Grammars, demo_model: TextModel
) -> None:
    words = long_words(demo_model, MAX_CHOICES)
    assert len(words) == MAX_CHOICES
    assert verdict_on(grammars, grammar_of_choices(words)) is None


def test_the_mask_of_many_choices_costs_less_than_one_of_a_rule_with_an_item_each(
    grammars: Grammars, demo_model: TextModel
) -> None:
    words = long_words(demo_model, 1900)
    rule = json.dumps({"grammars": [{"lark_grammar": f"start: {alternatives(words)}"}]})
    # Thirty times less where nothing else runs (2026-11-27).
    in_a_rule = min(mask_seconds(grammars, rule) for _ in range(3))
    assert min(mask_seconds(grammars, grammar_of_choices(words)) for _ in range(3)) < in_a_rule / 3
