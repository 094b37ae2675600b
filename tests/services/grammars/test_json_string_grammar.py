"""Grammars of texts against the grammars of the same texts as JSON strings write them: both take
the same."""
# ruff: noqa: E501 (a row is a line)

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from headwater.services.grammars.json_string_grammar import quoted_grammar, quoted_regex
from headwater.services.runtime.errors import BadRequest

BYTES = LLTokenizer("byte")
GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('start: "a\\"b\\\\c" NL\nNL: /\\n+/', ['a"b\\c\n\n'], ['a"b\\c', "a"]),
    ("start: /[^a]+/", ['b"\\\n\x01é'], ["a", "ba"]),
    ("start: /(?s:.*)/", ['b"\\\n\x01é', ""], []),
    ("start: /.*/", ['b"\\é\x01'], ["a\n"]),
    ("start: WORD (WS WORD)*\n%import common.WORD\n%import common.WS", ["a b\n\tc"], ["a b "]),
    (
        "start: item+\nitem: ESCAPED_STRING | NUM\n%import common (ESCAPED_STRING)\n%import "
        "common.SIGNED_NUMBER -> NUM\n%ignore / +/",
        ['"a\\"b" 5 "x"'],
        ['"a', "5 x"],
    ),
    ("start: C_COMMENT | SH_COMMENT\n%import common (C_COMMENT, SH_COMMENT)", ['/* " \n */', '# "'], ["/* ", "#\n"]),
    ('start: "sel\\nect"i', ["SEL\nECT", "sel\nect"], ["selnect", "SELNECT"]),
    ("start: /a\"b\\nx/i", ['A"B\nX', 'a"b\nx'], ["anb", "A"]),
    ('start: " ".."%"', ["!", '"', " "], ["&"]),
    ('start: /[\\s"\\]a-c]+/ "\\x2f" /[[:alpha:]]/ // a comment with "quotes"', [' "]\na/z'], ["d/z"]),
    ("start: /[]a]+/", ["a]"], ["b"]),
    (r"start: /\x22\u{5c}(?i)X\d{2,3}/", ['"\\x12', '"\\X123'], ['"x12']),
    (r"start: /\W\S\D/", ['"\\"'], ["\n\n\n"]),
    (r"start: /[\w&&[^\d]]+[\W--\s]/", ['ab"', "a\\"], ["a1", "a\n"]),
    ('start: a "x"\na[suffix="\\n"]: /[a-z ]+/', ["a b\nx"], ["a bx"]),
    (r"start: /(?i-s:a.)|b(?P<n>.)/s", ['A"', "b\n"], ["a\n"]),
    ('start: A\nA: /[a-z"]+/ & ~/.*".*/', ["ab"], ['a"b', "A"]),
    ('start: A "."\nA: ~("a" | B  "c") & /[^.]{1,3}/ // not those\nB: "\\n"', ["\n.", '".'], ["a.", "\nc.", "abcd."]),
    ('start: A\nA: "(" ~ ( "a" | ~/["\\n]/ ) ")"', ['(")', "(\n)"], ["(a)", "(b)", "()"]),
    (r"start: /\p{L}\pL\P{L}/", ['éa"'], ["éaa"]),
]  # fmt: skip


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    assert not matcher.is_error(), (grammar, matcher.get_error())
    letters = list(text.encode())
    return bool(matcher.try_consume_tokens(letters) == len(letters) and matcher.is_accepting())


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize(("grammar", "taken", "refused"), GRAMMARS)
def test_a_text_is_taken_as_json_writes_it(
    grammar: str, taken: list[str], refused: list[str]
) -> None:
    inside = quoted_grammar("p", grammar)
    for text in [*taken, *refused]:
        assert accepts(grammar, text) == accepts(inside, quoted(text)) == (text in taken), (
            text,
            inside,
        )


PIECES = [
    "a",
    r"\n",
    r"\\",
    '"',
    ".",
    r"\s",
    r"\W",
    "[^b]",
    r"[\x00-\x1f]",
    "(?s:.)",
    "(?i:b)",
    "[a-c]",
    r"[\[\]\"]",
]


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from(PIECES), st.sampled_from(["", "+", "?", "{0,2}"])),
        min_size=1,
        max_size=4,
    ),
    text=st.text(alphabet='ab"\\\n\t\x01[é', max_size=6),
)
def test_an_expression_takes_the_same_texts_as_json_writes_them(
    pieces: list[tuple[str, str]], text: str
) -> None:
    regex = "".join(piece + times for piece, times in pieces)
    assert accepts(f"start: /{regex}/", text) == accepts(
        f"start: /{quoted_regex('p', regex)}/", quoted(text)
    )


@pytest.mark.parametrize(
    "grammar", ["start: <|im_end|>", "start: <[5]>", "start: @other", 'start: %json {"type": '
                                                                      '"object"}', "start: "
                                                                                   "%regex { \"substring_chars\": \"a\" }", "start: /[a/", 'start: "\\q"', 'start: "\\ud800"', "start: /a b/x", f"start: /[{'ab' * 2000}\n]/"]
)  # fmt: skip
def test_what_is_no_text_is_refused(grammar: str) -> None:
    with pytest.raises(BadRequest) as refused:
        quoted_grammar("tools[0].custom.format.grammar.definition", grammar)
    assert refused.value.param == "tools[0].custom.format.grammar.definition"
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize("part", ["/\\", '"\\'], ids=["expression", "string"])
def test_what_has_no_end_is_refused_after_one_reading(part: str) -> None:
    began = time.thread_time()
    with pytest.raises(BadRequest) as refused:
        quoted_grammar("p", "start: " + part * 100_000)
    assert time.thread_time() - began < 2
    assert len(refused.value.message) < 200


def test_the_unreadable_one_of_many_classes_is_named() -> None:
    many = "".join(f"[{chr(0x4E00 + i)}-{chr(0x5000 + i)}]" for i in range(100))
    assert quoted_regex("p", many) == many
    with pytest.raises(BadRequest, match=r"has '\[z-a\]' in a regular expression, which cannot"):
        quoted_regex("p", f"{many}[z-a]{many}")
