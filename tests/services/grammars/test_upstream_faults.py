"""llguidance's faults that this room works around. A test that fails tells that a release has
mended one: then its workaround can go."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

BYTES = LLTokenizer("byte")
ALL_ESCAPES = {"whitespace_flexible": False}


def matcher_of(**grammar: Any) -> LLMatcher:
    return LLMatcher(BYTES, json.dumps({"grammars": [grammar]}), log_level=0)


def takes(text: str, schema: dict[str, Any]) -> bool:
    matcher = matcher_of(json_schema=schema | {"x-guidance": ALL_ESCAPES})
    assert not matcher.is_error()
    letters = list(text.encode())
    return bool(matcher.try_consume_tokens(letters) == len(letters) and matcher.is_accepting())


def following(text: str, schema: dict[str, Any]) -> str:
    """Characters that may follow a text."""
    matcher = matcher_of(json_schema=schema | {"x-guidance": ALL_ESCAPES})
    assert matcher.try_consume_tokens(list(text.encode())) == len(text)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return "".join(map(chr, np.flatnonzero(bits[:128])))


def test_other_names_have_escapes_by_which_a_declared_one_comes_again() -> None:
    """`open_objects.escapes`"""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True}
    assert takes('{"a":1,"\\u0061":5}', schema)
    assert not takes(
        '{"a":"\\u0061"}', {"type": "object"} | schema | {"properties": {"a": {"type": "string"}}}
    )


def test_a_declared_name_out_of_order_goes_on_with_an_escaped_quote() -> None:
    """`open_objects.with_words_behind_names`"""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True}
    after = following('{"a":1,"a', schema)
    assert '"' not in after
    assert "\\" in after


def test_a_pattern_without_names_left_is_a_dead_end() -> None:
    """`open_objects.with_named_patterns`"""
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "patternProperties": {"^a$": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert "," in following('{"a":1', schema)
    assert following('{"a":1,', schema) == ""


def test_a_schema_that_requires_itself_is_compiled() -> None:
    """`endless`"""
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert following('{"a":{"a":', schema) == "{"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("date", "2021-02-29"),
        ("time", "10:30:60Z"),
        ("date-time", "2021-02-29T10:00:00Z"),
        ("date-time", "2021-02-28T10:30:60Z"),
    ],
)
def test_a_format_takes_what_is_no_date_or_time(name: str, text: str) -> None:
    """`formats`"""
    assert takes(json.dumps(text), {"type": "string", "format": name})


def test_a_string_of_lark_has_no_delete_character() -> None:
    """`lark.quoted`"""
    assert matcher_of(lark_grammar='start: "\x7f"').is_error()
    assert not matcher_of(lark_grammar='start: "\\u007f"').is_error()


def test_a_special_tokens_text_is_forced_as_the_token(demo_folder: Path) -> None:
    """`unspelled_tokens`"""
    tokenizer = LLTokenizer((demo_folder / "tokenizer.json").read_text(), eos_token=[2])
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "<|im_end|>"'}]})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert list(np.flatnonzero(bits)) == [2]
    matcher.consume_token(2)
    assert matcher.is_error()


def test_a_character_without_tokens_is_forced_in_part(demo_folder: Path) -> None:
    """`spelling`"""
    tokenizer = LLTokenizer((demo_folder / "tokenizer.json").read_text(), eos_token=[2])
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "\U00040000"'}]})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    dice = random.Random(0)
    while not matcher.is_error() and not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            break
        matcher.consume_token(int(dice.choice(list(allowed))))
    assert matcher.is_error()


def test_rules_of_gbnf_that_differ_in_hyphens_are_one() -> None:
    """`lark._as_lark`"""
    with pytest.raises(Exception, match="already exists"):
        gbnf_to_lark('root ::= a-b a_b\na-b ::= "x" root?\na_b ::= "y" root?')
    with pytest.raises(Exception, match="already exists"):
        gbnf_to_lark('root ::= start\nstart ::= "x"')
