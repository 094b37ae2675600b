"""Rules of Lark and GBNF that never end."""

from __future__ import annotations

import time

import pytest

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.endless_rules import endless_rule
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.runtime.errors import BadRequest

ENDLESS = {
    'start: "a" start': "start",
    "start: start": "start",
    'start: x | "b"\nx: "a" x': "x",
    'start: "b" x?\nx: "a" (x | x "c")+': "x",
    'start: x{2} | "b"\nx: "a"{1,3} y\ny: (x)~1..2': "x",
    'start: %json {"a": "}"} start // a comment': "start",
    'start: "b" | <|x|> a\n?a: b -> c\nb: /[)(]/ a': "a",
}
ENDING = [
    'start: "a" start | "b"',
    'start: "a" start?',
    'start: "a" start* | "b" [start]',
    'start: "a" start{0,3} | "b" start~0..2',
    'start: "a"\nx: "b" x',
    'start: e\n?e: e "+" t | t\n?t: NUM | "(" e ")" -> par\nNUM: /[0-9]+/\n%ignore / +/',
    'start: x\nx[max_tokens=3]: "a" x',
    'start: x\nx[suffix="]"]: "a" x',
    "start: x::1\nx::p: x::p",
    'start: %lark { start: "a" start }',
    "start: @other start | @other",
    "start: (",
    "start: x",
    "",
]


@pytest.mark.parametrize(("grammar", "rule"), ENDLESS.items())
def test_a_rule_without_an_end_is_refused_by_name(grammar: str, rule: str) -> None:
    with pytest.raises(BadRequest, match=f"its rule '{rule}' never ends") as refused:
        grammar_of(StructuredOutput(grammar=grammar), {})
    assert refused.value.param == "structured_output.grammar"


@pytest.mark.parametrize("grammar", ENDING)
def test_a_rule_that_may_end_is_taken(grammar: str) -> None:
    assert endless_rule(grammar) is None


def test_a_rule_of_gbnf_has_its_name_in_the_refusal() -> None:
    for grammar, rule in (
        ('root ::= "a" root', "root"),
        ('root ::= fooBar | "b"\nfooBar ::= "a" fooBar', "fooBar"),
    ):
        with pytest.raises(BadRequest, match=f"its rule '{rule}' never ends"):
            grammar_of(StructuredOutput(grammar=grammar), {})
    assert grammar_of(StructuredOutput(grammar='root ::= "a" root | "b"'), {})


@pytest.mark.parametrize(
    "text", ["(", "a[", "A[", '"\\"', "a ", "{ ", "~", "/\\", "<", "a.-", "\t", "[!", "a"]
)
def test_reading_takes_linear_time(text: str) -> None:
    began = time.thread_time()
    endless_rule("start: " + text * 20_000)
    assert time.thread_time() - began < 1
