"""What a grammar accepts, seen through the demo model's tokens."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.grammars.grammars import Grammars, grammars_of
from headwater.services.grammars.json_schema import MAX_OPTIONAL
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.model import TextModel

CHOICES = StructuredOutput.Choices
SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2}
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FOO: dict[str, Any] = {
    "type": "tag",
    "begin": "<f=foo>",
    "content": {"type": "json_schema", "json_schema": X},
    "end": "</f>",
}
OLD_FOO = {"begin": "<f=foo>", "schema": X, "end": "</f>"}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}


def tag(**form: Any) -> dict[str, Any]:
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [FOO]}
ACCEPTED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "an expression, anchored or not": ({"regex": r"^[a-z]+/\d{2}$"}, ["ab/12"], ["ab/1", "ab/123", " ab/12"]),
    "choices, whatever is in them": ({"choice": CHOICES(choices=["red", 'a "b"\n'])}, ["red", 'a "b"\n'], ["re", "a"]),
    "objects, compact, spaced or indented": (
        {"json_object": True},
        ["{}", '{"a":1}', '{ "a": 1 }', '{\n  "a": [\n    1\n  ]\n}'],
        ["[1]", '{"a":1', '{\n\n"a":1}'],
    ),
    "whitespace as asked": ({"json_object": True, "whitespace_pattern": " ?"}, ['{"a": 1}'], ['{"a":  1}']),
    "no whitespace": ({"json_object": True, "whitespace_pattern": ""}, ['{"a":1}'], ['{"a": 1}']),
    "a schema": ({"json_schema": json.dumps(X)}, ['{"x": 3}', '{"x":3,"y":[]}'], ["{}", '{"x": "3"}', '{"x": 3.5}']),
    "a Lark grammar": ({"grammar": 'start: "a"+ NUM\nNUM: /[0-9]/'}, ["aa1"], ["a", "1"]),
    "a Lark grammar of what looks like GBNF": ({"grammar": 'start: "a ::= " /[a-z]/'}, ["a ::= b"], ["a ="]),
    "a grammar in GBNF": (
        {"grammar": 'root ::= "-"? num ("." [0-9]+)? # a number\nnum ::= [1-9] [0-9]*'},
        ["7", "-10.25"],
        ["07", "1.", "x"],
    ),
    "structures among free text": (
        {"structural_tag": json.dumps({"structures": [OLD_FOO], "triggers": ["<f="]})},
        ["free", 'a<f=foo>{"x":1}</f>b<f=foo>{"x":2}</f>'],
        ["<f=bar>", '<f=foo>{"y"', '<f=foo>{"x":1}'],
    ),
    "at least one tag": (tag(**TRIGGERED, at_least_one=True), ['so <f=foo>{"x":1}</f> and'], ["free"]),
    "nothing after the first tag": (
        tag(**TRIGGERED, stop_after_first=True),
        ["free", '<f=foo>{"x":1}</f>'],
        ['<f=foo>{"x":1}</f>!'],
    ),
    "tags in a row": (
        tag(type="tags_with_separator", tags=[FOO], separator=", "),
        ["", '<f=foo>{"x":1}</f>', '<f=foo>{"x":1}</f>, <f=foo>{"x":2}</f>'],
        ['<f=foo>{"x":1}</f><'],
    ),
    "one tag and no more": (
        tag(type="tags_with_separator", tags=[FOO], separator=",", at_least_one=True, stop_after_first=True),
        ['<f=foo>{"x":1}</f>'],
        ["", '<f=foo>{"x":1}</f>,'],
    ),
    "thoughts, then an answer": (
        tag(type="sequence", elements=[THINK, {"type": "or", "elements": [
            {"type": "regex", "pattern": r"\d+"}, {"type": "grammar", "grammar": 'root ::= '
                                                                                 '"yes" | "no"'}]}]),
        ["<think>a < b\n</think>12", "<think></think>yes"],
        ["12", "<think>a</think>maybe"],
    ),
    "text as given": (tag(type="const_string", value="a/b"), ["a/b"], ["a"]),
}  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": "{"}, "structured_output.json_schema", "is not valid JSON"),
    ({"json_schema": "[1]"}, "structured_output.json_schema", "allowed: a JSON Schema that is "
                                                              "an object"),
    ({"json_schema": "[" * 65 + "]" * 65}, "structured_output.json_schema", "is nested 65 deep; "
                                                                            "allowed: at most 64"),
    ({"json_schema": "[" * 99_999}, "structured_output.json_schema", "has more than 128 levels"),
    ({"json_schema": json.dumps("x" * 300_000)}, "structured_output.json_schema", "allowed: at "
                                                                                  "most 262144"),
    ({"json_object": False}, "structured_output.json_object", "allowed: true"),
    ({"regex": ""}, "structured_output.regex", "allowed: a regular expression that is not empty"),
    ({"choice": CHOICES()}, "structured_output.choice", "allowed: at least one string, none empty"),
    ({"choice": CHOICES(choices=["a", ""])}, "structured_output.choice", "allowed: at least one "
                                                                         "string, none empty"),
    ({"choice": CHOICES(choices=map(str, range(5000)))}, "structured_output.choice", "allowed: "
                                                                                     "at most 4096"),
    ({"grammar": " "}, "structured_output.grammar", "allowed: a Lark grammar"),
    ({"grammar": "root ::= x"}, "structured_output.grammar", "has no rule named 'x'"),
    ({"grammar": 'start ::= "x"'}, "structured_output.grammar", "has no rule named 'root'"),
    ({"grammar": 'root ::= "x'}, "structured_output.grammar", "is no GBNF: "),
    ({"grammar": "root ::= " + "(" * 90_000}, "structured_output.grammar", "is no GBNF: "),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern", "allowed: with JSON"),
    ({}, "structured_output.kind", "allowed: json_schema, json_object, regex, choice, grammar or "
                                   "structural_tag"),
    (tag(type="magic"), "structured_output.structural_tag", "an object whose type is any_text, "
                                                            "const_string"),
    (tag(**FOO | {"end": 3}), "structured_output.structural_tag", "`begin` and `end`, both strings"),
    (
        tag(**TRIGGERED | {"triggers": ["<g="]}),
        "structured_output.structural_tag",
        "allowed: text that starts with one of ['<g=']",
    ),
    (
        tag(**TRIGGERED | {"triggers": [""]}),
        "structured_output.structural_tag",
        "allowed: a string that is not empty",
    ),
    (
        tag(**FOO | {"content": {"type": "json_schema", "json_schema": {"not": {}}}}),
        "structured_output.structural_tag",
        "uses the keyword 'not'",
    ),
]  # fmt: skip
NOT_ENFORCED: dict[str, Any] = {
    "not": {"type": "string"},
    "if": {"type": "string"},
    "then": {"minLength": 1},
    "else": {"minLength": 1},
    "dependentSchemas": {"a": {}},
    "dependentRequired": {"a": ["b"]},
    "dependencies": {"a": ["b"]},
    "uniqueItems": True,
    "contains": {"type": "string"},
    "minContains": 1,
    "maxContains": 1,
    "unevaluatedItems": {"type": "string"},
    "propertyNames": {"pattern": "^a"},
    "unevaluatedProperties": {"type": "string"},
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "minProperties": 2,
}


@pytest.fixture(scope="module")
def grammars(demo_model: TextModel) -> Grammars:
    return grammars_of(demo_model.folder)


def accepts(grammars: Grammars, demo_model: TextModel, grammar: str, text: str) -> bool:
    matcher = grammars.compile(grammar)
    token_ids = demo_model.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_grammar_accepts(case: str, grammars: Grammars, demo_model: TextModel) -> None:
    asked, matching, others = ACCEPTED[case]
    grammar = grammar_of(StructuredOutput(**asked), SPECIAL)
    assert [text for text in matching if not accepts(grammars, demo_model, grammar, text)] == []
    assert [text for text in others if accepts(grammars, demo_model, grammar, text)] == []


@pytest.mark.parametrize(("asked", "param", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_no_grammar_can_be_made_of_is_refused(
    asked: dict[str, Any], param: str, sentence: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(StructuredOutput(**asked), SPECIAL)
    assert caught.value.param == param
    assert sentence in caught.value.message


@pytest.mark.parametrize("keyword", NOT_ENFORCED)
@pytest.mark.parametrize(
    ("around", "path"),
    [
        (lambda part: part, "the top level"),
        (lambda part: {"properties": {"a": {"items": part}}}, "/properties/a/items"),
        (
            lambda part: {"anyOf": [{}, {"additionalProperties": part}]},
            "/anyOf/1/additionalProperties",
        ),
        (lambda part: {"$ref": "#/$defs/x", "$defs": {"x": {"allOf": [part]}}}, "/$defs/x/allOf/0"),
    ],
    ids=["top", "items", "anyOf", "$defs"],
)
def test_a_keyword_that_cannot_be_held_to_is_refused_by_name_and_place(
    keyword: str, around: Any, path: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(
            StructuredOutput(json_schema=json.dumps(around({keyword: NOT_ENFORCED[keyword]}))),
            SPECIAL,
        )
    sentence = (
        f"structured_output.json_schema uses the keyword {keyword!r} at {path}, which is "
        "not supported: "
    )
    assert caught.value.message.startswith(sentence)
    assert caught.value.code == "unsupported_schema"


def test_a_property_may_bear_the_name_of_a_keyword() -> None:
    schema = {"properties": {"not": {"type": "string"}, "if": {}}, "required": ["contains"]}
    assert grammar_of(StructuredOutput(json_schema=json.dumps(schema)), SPECIAL)


def test_a_keyword_that_says_nothing_is_taken_as_such(
    grammars: Grammars, demo_model: TextModel
) -> None:
    output = {
        "uniqueItems": False,
        "minContains": 0,
        "not": False,
        "propertyNames": True,
        "dependentRequired": {},
    }
    schema = {"type": "array", "items": {"enum": [1, output]} | output, "maxItems": 2} | output
    grammar = grammar_of(StructuredOutput(json_schema=json.dumps(schema)), SPECIAL)
    assert accepts(grammars, demo_model, grammar, "[1, 1]")
    assert accepts(grammars, demo_model, grammar, json.dumps([output]))
    for keyword, value in (
        ("uniqueItems", 0),
        ("unevaluatedProperties", False),
        ("propertyNames", False),
    ):
        with pytest.raises(BadRequest, match=keyword):
            grammar_of(StructuredOutput(json_schema=json.dumps({keyword: value})), SPECIAL)


@pytest.mark.parametrize("more", [{}, {"type": "object"}], ids=["any type", "object"])
def test_as_many_optional_properties_are_taken_as_an_answer_can_follow(
    more: dict[str, Any], grammars: Grammars, demo_model: TextModel
) -> None:
    schema = more | {"properties": {f"p{i}": {"type": "null"} for i in range(MAX_OPTIONAL)}}
    grammar = grammar_of(StructuredOutput(json_schema=json.dumps(schema)), SPECIAL)
    assert accepts(grammars, demo_model, grammar, '{"p0": null, "p479": null}')
    schema["properties"]["p480"] = True
    with pytest.raises(BadRequest, match="has 481 optional properties in a row at the top level"):
        grammar_of(StructuredOutput(json_schema=json.dumps(schema)), SPECIAL)
    schema["required"] = ["p200"]
    assert grammar_of(StructuredOutput(json_schema=json.dumps(schema)), SPECIAL)


def test_empty_lines_of_a_grammar_take_linear_time(
    grammars: Grammars, demo_model: TextModel
) -> None:
    before = time.process_time()
    grammar = grammar_of(StructuredOutput(grammar="\n" * 100_000 + 'start: "a"'), SPECIAL)
    assert time.process_time() - before < 5
    assert accepts(grammars, demo_model, grammar, "a")


def test_a_property_may_be_required_as_older_schemas_say_it(
    grammars: Grammars, demo_model: TextModel
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "required": True}}}
    grammar = grammar_of(StructuredOutput(json_schema=json.dumps(schema)), SPECIAL)
    assert accepts(grammars, demo_model, grammar, '{"a":"b"}')


@pytest.mark.parametrize("end", ["<|im_start|>", "\n<|im_start|>", "<|im_start|>\n"])
def test_a_special_token_in_a_tag_is_that_token_and_not_its_letters(
    grammars: Grammars, demo_model: TextModel, end: str
) -> None:
    form = tag(type="tag", begin="<|im_start|>call", content={"type": "any_text"}, end=end)
    matcher = grammars.compile(grammar_of(StructuredOutput(**form), SPECIAL))
    token_ids = demo_model.tokenizer.encode(f"<|im_start|>call me{end}", add_special_tokens=False)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()
