"""Masks of automata: equal to llguidance's, bit by bit, wherever the automaton has them."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.automata.builder import LOST, Unfollowed
from headwater.services.grammars.automata.vocabulary import NO_TOKEN
from headwater.services.grammars.grammars import Grammars, fill
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.text.model import TextModel
from tests.long_values import long_but
from tests.services.grammars.structured_schemas import random_schemas, written
from tests.services.grammars.walks import Walker

INT: Any = {"type": "integer"}
TEXT: Any = {"type": "string"}
VALUES: dict[str, Any] = {
    "name": {"type": "string", "minLength": 2, "maxLength": 20},
    "note": TEXT,
    "age": INT | {"minimum": -17, "maximum": 1234},
    "debt": INT | {"minimum": -340, "maximum": -9},
    "least": INT | {"minimum": 34},
    "most": INT | {"maximum": 120},
    "any": INT,
    "size": {"type": "number"},
    "kind": {"enum": ["new", "newer", 1, 12, None, True]},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [INT, {"type": "boolean"}, {"$ref": "#/$defs/pair"}]},
    "mixed": {"anyOf": [{"enum": ["x"]}, TEXT, INT, {"type": "number"}]},
    "email": {"type": "string", "pattern": "^[a-z]{2,5}@[a-z]{2}$"},
    "part": {"type": "string", "pattern": "xy|^.b"},
    "quoted": {"type": "string", "pattern": '^[^"]{2}$'},
    "accent": {"type": "string", "pattern": "^[é-ö]{2}$"},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    "list": {"type": "array", "items": INT, "minItems": 2},
    "long": {"type": "array", "items": {"type": "null"}, "minItems": 40},
    "Größe": {"enum": ["größer", "groß", "klein"]},
    "alike": {"enum": ["né", "nö"]},
    "motto": {"const": "the longest night of the year " * 12},
    "none": {"type": "array", "items": INT, "maxItems": 0},
}
PAIR = {
    "type": "object",
    "properties": {"a": TEXT, "b": {"type": "array", "items": INT}},
    "required": ["b"],
    "additionalProperties": False,
}
EVERYTHING = {
    "type": "object",
    "properties": VALUES,
    "required": [*VALUES][::2],
    "additionalProperties": False,
    "$defs": {"pair": PAIR},
}


@pytest.fixture
def grammars(walker: Walker) -> Grammars:
    return walker.grammars


def grammar_of_schema(schema: dict[str, Any], *, is_compact: bool) -> str:
    asked = StructuredOutput(json_schema=json.dumps(schema), strict=True)
    if is_compact:
        asked.whitespace_pattern = ""
    return grammar_of(asked, {})


def walk(
    model: TextModel, grammars: Grammars, grammar: str, dice: random.Random, num_tokens: int
) -> Counter[str]:
    """Takes allowed tokens by lot, and compares the mask before each."""
    automaton = grammars.automaton(grammar)
    matcher = grammars.compile(grammar)
    closing = set(model.tokenizer.encode('"}],:', add_special_tokens=False))
    mask = np.zeros(grammars.num_words, np.int32)
    expected = np.zeros_like(mask)
    state = automaton.start
    token = NO_TOKEN
    seen = Counter[str]()
    while seen.total() < num_tokens and not matcher.is_stopped():
        fill(matcher, expected)
        if automaton.write_mask(state, token, mask):
            assert np.array_equal(mask, expected), (grammar, seen)
            seen["equal"] += 1
        else:
            seen["lost" if state == LOST else "asked"] += 1
        allowed = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little"))
        ending = [token for token in allowed.tolist() if token in closing]
        token = dice.choice(ending if ending and dice.random() < 0.4 else allowed.tolist())
        matcher.consume_token(token)
        state = automaton.after(state, [token])
    return seen


@pytest.mark.parametrize("is_compact", [False, True], ids=["spaced", "compact"])
@pytest.mark.parametrize("num_walks", long_but((1, 100), 1))
def test_masks_of_all_that_is_followed_are_those_of_llguidance(
    demo_model: TextModel, grammars: Grammars, num_walks: int, *, is_compact: bool
) -> None:
    grammar = grammar_of_schema(EVERYTHING, is_compact=is_compact)
    seen = Counter[str]()
    for seed in range(num_walks):
        seen += walk(demo_model, grammars, grammar, random.Random(seed), 80)
    assert seen["equal"] > 0.6 * seen.total()


@pytest.mark.parametrize("step", long_but((1, 40), 40))
def test_masks_of_any_schema_are_those_of_llguidance(
    demo_model: TextModel, grammars: Grammars, step: int
) -> None:
    seen = Counter[str]()
    for number, schema in enumerate([*written(), *random_schemas(150, seed=1)][::step]):
        grammar = grammar_of_schema(schema, is_compact=bool(number % 2))
        # Objects with names of both kinds have escapes of their own.
        with contextlib.suppress(Unfollowed):
            seen += walk(demo_model, grammars, grammar, random.Random(number), 60)
    assert seen["equal"] > 0.2 * seen.total()


@pytest.mark.parametrize(
    ("schema", "whitespace"),
    [
        (TEXT, " ?"),
        ({"type": "array", "items": {"type": "string", "maxLength": 300}, "minItems": 8}, ""),
    ],
    ids=["other white space", "too many states"],
)
def test_some_grammars_are_left_to_llguidance(
    grammars: Grammars, schema: dict[str, Any], whitespace: str
) -> None:
    asked = StructuredOutput(json_schema=json.dumps(schema), whitespace_pattern=whitespace)
    with pytest.raises(Unfollowed):
        grammars.automaton(grammar_of(asked, {}))
    with pytest.raises(Unfollowed):
        grammars.automaton(grammar_of(StructuredOutput(regex="a+"), {}))


def test_where_one_byte_alone_may_come_the_tokenizers_spelling_is_allowed(
    demo_model: TextModel, grammars: Grammars
) -> None:
    encode = demo_model.tokenizer.encode
    automaton = grammars.automaton(grammar_of_schema(EVERYTHING, is_compact=False))
    mask = np.zeros(grammars.num_words, np.int32)
    [brace, quote] = encode('{ "', add_special_tokens=False)
    state = automaton.after(automaton.start, [brace, quote])
    assert automaton.write_mask(state, quote, mask)
    [name] = encode("name", add_special_tokens=False)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [name]
