"""Text of clients in grammars: it is written as it was given, or refused with the field's name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.answer_grammar import content_grammar
from headwater.services.grammars.check import verdict_on
from headwater.services.grammars.grammars import GrammarError, Grammars, grammars_of
from headwater.services.grammars.structured_output import grammar_of, param_of
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.model import TextModel
from tests.services.grammars.walks import Walker

TEXTS = [
    "\x00",
    "\x1f",
    "\x7f",
    "a\x7fb\n",
    "\x80\x9f",
    "\u2028\u2029",
    "\ufeff\ufffe\U0010ffff",
    "\ud7ff\ue000",
    "e\u0301 \u202e",
    "😀日本",
    'say "a\\"',
    "a/b//c",
    "/",
    "#",
    "<|im_end|>",
    "yes<|im_end|>",
    "<think>no</think>",
    "<|endoftext|>x<|im_start|>",
    "<tool_call>",
    "[TOOL_CALLS][",
    "<|nothing|>",
    "%json {}",
    "@start",
]
ASKED: dict[str, Callable[[str], tuple[StructuredOutput, Callable[[str], Any]]]] = {
    "choice": lambda text: (
        StructuredOutput(choice=StructuredOutput.Choices(choices=[text])),
        lambda written: written,
    ),
    "regex": lambda text: (StructuredOutput(regex=re.escape(text)), lambda written: written),
    "const": lambda text: (schema(const=text), json.loads),
    "enum": lambda text: (schema(enum=[text, text + "!"]), lambda each: json.loads(each)[: len(text)]),
    "pattern": lambda text: (schema(type="string", pattern=f"^{re.escape(text)}$"), json.loads),
    "name": lambda text: (
        schema(properties={text: {"const": 1}}, required=[text], type="object"),
        lambda written: next(iter(json.loads(written))),
    ),
    "constant object": lambda text: (
        schema(const={text: [text]}),
        lambda written: next(iter(json.loads(written))),
    ),
    "fixed text": lambda text: (
        StructuredOutput(
            structural_tag=json.dumps(
                {
                    "format": {
                        "type": "tag",
                        "begin": "a",
                        "content": {"type": "regex", "pattern": re.escape(text)},
                        "end": "b",
                    }
                }
            )
        ),
        lambda written: written[1:-1],
    ),
    "opening": lambda text: (
        StructuredOutput(
            structural_tag=json.dumps({"format": {"type": "sequence", "elements": [
                {"type": "const_string", "value": text + "|"},
                {"type": "regex", "pattern": "a"},
            ]}})
        ),
        lambda written: written[:-2],
    ),
}  # fmt: skip


def schema(**keywords: Any) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(keywords), strict=True, whitespace_pattern="")


@pytest.mark.parametrize("kind", ASKED)
def test_text_is_written_as_it_was_given(kind: str, walker: Walker, demo_model: TextModel) -> None:
    for text in TEXTS:
        asked, read = ASKED[kind](text)
        if kind == "opening" and not demo_model.tokenizer.missing_bytes.isdisjoint(text.encode()):
            with pytest.raises(BadRequest, match="which no tokens of the model spell"):
                content_grammar(demo_model, asked)
            continue
        written = walker.answers(content_grammar(demo_model, asked), 1)
        assert {None if each is None else read(each) for each in written} == {text}


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(text=st.text(min_size=1, max_size=6), kind=st.sampled_from(sorted(ASKED)))
def test_any_text_is_written_exactly(
    text: str, kind: str, walker: Walker, demo_model: TextModel
) -> None:
    asked, read = ASKED[kind](text)
    assume(demo_model.tokenizer.missing_bytes.isdisjoint(text.encode()))
    grammar = content_grammar(demo_model, asked)
    assert {None if each is None else read(each) for each in walker.answers(grammar, 2)} == {text}


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize(
    "place", ["{}", "a long beginning, longer than any trial of tokens is: {}"]
)
def test_a_character_without_tokens_is_refused_wherever_it_stands(
    kind: str, place: str, demo_model: TextModel
) -> None:
    """No token of the demo model has the byte F1, with which U+40000 begins."""
    asked, _ = ASKED[kind](place.format("\U00040000"))
    with pytest.raises(
        BadRequest, match=r"U\+40000, which no tokens of the model spell"
    ) as refused:
        content_grammar(demo_model, asked)
    assert refused.value.param == param_of(asked)


def test_a_special_token_is_named_by_its_text_in_a_grammar(
    walker: Walker, demo_model: TextModel
) -> None:
    special = demo_model.tokenizer.special_texts
    asked = StructuredOutput(grammar='start: "a<|im_start|>" <|im_start|> "b" // <|im_end|>')
    grammar = grammar_of(asked, special)
    assert f"<[{special['<|im_start|>']}]>" in grammar
    assert walker.answers(grammar, 3) == {"a<|im_start|><|im_start|>b"}


def test_rules_of_gbnf_have_any_names(walker: Walker) -> None:
    text = 'root ::= start fooBar foo-bar foo_bar\nstart ::= "a"\nfooBar ::= "b" root?\n'
    asked = StructuredOutput(grammar=text + 'foo-bar ::= "c"\nfoo_bar ::= [d-e]')
    grammar = grammar_of(asked, {})
    assert walker.takes(grammar, "abcd")
    assert walker.takes(grammar, "ababcdce")
    assert not walker.takes(grammar, "abdc")


BROKEN: list[tuple[dict[str, str], str]] = [
    ({"regex": "a("}, "a regular expression has a bracket without its partner"),
    ({"regex": "[b-a]"}, "a regular expression cannot be read"),
    ({"regex": r"\bx"}, "a regular expression uses look-around or a word boundary"),
    ({"regex": r"(a)\1"}, "a regular expression refers back to a group"),
    ({"regex": "*"}, "a regular expression repeats nothing, or too often"),
    ({"grammar": "start: x"}, "it uses the name 'x', which it does not define"),
    ({"grammar": 'x: "a"'}, "it has no rule named 'start'"),
    ({"grammar": 'start: "a" @'}, "it cannot be read to its end"),
    ({"grammar": 'start "a"'}, "it cannot be read from '\"a\"' on"),
    ({"grammar": "start: <|foo|>"}, "it names a special token that is not known"),
    ({"grammar": 'start: A\nA: A "b"'}, "its terminal 'A' refers to itself"),
    ({"grammar": 'start: a\na: "x"\na: "y"'}, "it defines 'a' twice"),
    ({"grammar": "%import common.FOO\nstart: FOO"}, "it imports 'common.FOO', which is not there"),
    ({"grammar": 'start: %json {"type": "zzz"}'}, "it has the unknown type 'zzz'"),
    ({"json_schema": '{"format": "zip"}'}, "it has the unknown format 'zip'; allowed: date, "),
    ({"json_schema": '{"$ref": "#/$defs/a"}'}, "a $ref leads to '/$defs/a', where there is nothing"),
    ({"json_schema": '{"minLength": -1}'}, "its keyword 'minLength' has a value of the wrong type"),
    ({"json_schema": '{"required": [3]}'}, "its keyword 'required' has a value of the wrong type"),
    ({"json_schema": '{"patternProperties": {"a": {}, "b": {}}}'}, "the patterns 'a' and 'b' of "),
    ({"json_schema": '{"multipleOf": 0}'}, "its multipleOf has too many digits"),
    ({"json_schema": '{"type": "string", "pattern": "^a$", "minLength": 3}'}, "nothing matches it"),
]  # fmt: skip
OF_THE_COMPILER = re.compile(
    "(?i)parse|lexer|token '|lark|regex|satisf|non-verbose|f64|expected|bytes|rust| at \\d"
)


@pytest.mark.parametrize(("asked", "reason"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_refusal_has_no_words_of_the_compiler(
    asked: dict[str, str], reason: str, demo_grammars: Grammars
) -> None:
    output = verdict_on(demo_grammars, grammar_of(StructuredOutput(**asked), {}))
    assert (output or "").startswith(reason)
    assert OF_THE_COMPILER.search(output or "") is None


@pytest.fixture(scope="module")
def demo_grammars(demo_folder: Path) -> Grammars:
    return grammars_of(demo_folder)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a\n', "is no GBNF: it cannot be read to its end"),
        ('root ::= "a"\nroot ::= "b"', "has two rules named 'root'"),
        ("root ::= " + "(" * 90_000, "is no GBNF: it is nested too deeply"),
        ('root ::= "a"{99999999999999999999999}', "is no GBNF: "),
    ],
)
def test_refusals_of_gbnf_quote_no_compiler(
    grammar: str, message: str, demo_grammars: Grammars
) -> None:
    with pytest.raises((BadRequest, GrammarError)) as refused:
        demo_grammars.compile(grammar_of(StructuredOutput(grammar=grammar), {}))
    if isinstance(refused.value, BadRequest):
        assert message in refused.value.message
    assert OF_THE_COMPILER.search(str(refused.value)) is None


@pytest.mark.parametrize("regex", ["\\", "a\\", "^a\\\\\\"])
def test_a_regex_that_ends_in_an_escape_is_refused(regex: str) -> None:
    with pytest.raises(BadRequest, match="last backslash"):
        grammar_of(StructuredOutput(regex=regex), {})


def test_a_dollar_behind_an_escaped_backslash_is_an_anchor(walker: Walker) -> None:
    assert walker.answers(grammar_of(StructuredOutput(regex=r"^a\\$"), {}), 2) == {"a\\"}
    assert walker.answers(grammar_of(StructuredOutput(regex=r"^a\$"), {}), 2) == {"a$"}
