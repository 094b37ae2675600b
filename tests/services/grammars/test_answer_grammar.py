"""What answers with tools and thoughts are held to, seen through a model's tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.proto.common_pb2 import ChatMessage, CustomInput, Sampling, StructuredOutput, Tool
from headwater.proto.processor_pb2 import Conversation, PrepareReply, PrepareRequest, Prompt
from headwater.services.answers.parser import AnswerParser
from headwater.services.answers.tool_formats import TOOL_FORMATS
from headwater.services.grammars.answer_grammar import answer_grammar
from headwater.services.grammars.grammars import Grammars, grammars_of
from headwater.services.processor.prepare import prepare
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.model import ServingChoices, TextModel, load_text_model
from tests.long_values import long_but
from tests.services.answers.written_calls import BARE, WRITERS, Call, written_content
from tests.small_models import make_thinking_folder

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = Tool(name="weather", description="now", parameters_json=json.dumps(CITY), strict=True)
TIME = Tool(name="time", parameters_json=json.dumps(NOTHING))
Accepts = Callable[[str], bool]


@pytest.fixture(scope="module")
def thinking(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = make_thinking_folder(
        demo_folder, tmp_path_factory.mktemp("models") / "thinking", name="thinking"
    )
    return load_text_model(folder, "thinking", ServingChoices())


@pytest.fixture(scope="module")
def grammars(thinking: TextModel) -> Grammars:
    return grammars_of(thinking.folder)


def request(
    *tools: Tool, choice: str | None = None, sampling: Sampling | None = None, **more: Any
) -> PrepareRequest:
    user = ChatMessage(role="user", content="hi")
    conversation = Conversation(messages=[user], tools=tools, tool_choice=choice, **more)
    return PrepareRequest(
        prompt=Prompt(conversation=conversation),
        sampling=sampling or Sampling(),
        cache_namespace=bytes(16),
    )


def prepared(model: TextModel, asked: PrepareRequest) -> tuple[PrepareReply, str]:
    reply = prepare(model, asked)
    return reply, answer_grammar(model, asked, reply)


def accepts(model: TextModel, grammars: Grammars, grammar: str, text: str) -> bool:
    matcher = grammars.compile(grammar)
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


# One row of each table and kind: a row adds texts to a grammar, and no grammar of its own.
FORMATS = long_but(
    TOOL_FORMATS,
    *("qwen3_coder", "deepseek_v32", "kimi_k2", "step3", "hy_v3", "gemma4", "internlm", "hermes"),
    *("mistral", "command", "apertus", "minimax_m1", "olmo3", "lfm2", "pythonic", "xlam"),
    *("llama3_json", "gpt_oss", "glm4"),
)
ULM = '{"city": "Ulm", "unit": "C"}'
WEATHER_CALL: Call = ("weather", json.loads(ULM))
TIME_CALL: Call = ("time", {})
OTHER_UNIT: Call = ("weather", {"city": "Ulm", "unit": "K"})
WRONG_TYPES: list[Call] = [
    ("weather", {"city": "Ulm", "days": "x"}),
    ("weather", {"city": 3, "unit": "C"}),
]
"""Calls that do not match; a format that writes strings without quotes has no wrong strings."""


def written(form: str, *calls: Call) -> str:
    return WRITERS[form](calls)


def test_every_format_has_a_writer() -> None:
    assert WRITERS.keys() == TOOL_FORMATS.keys(), "add a row to written_calls.py"


@pytest.mark.parametrize("form", FORMATS)
def test_calls_that_are_due_are_written_as_the_family_writes_them(
    thinking: TextModel, grammars: Grammars, form: str
) -> None:
    model = dataclasses.replace(thinking, tool_format=form, reasoning_format="")
    weather, time = WEATHER_CALL, TIME_CALL
    wrong = [written(form, call) for call in WRONG_TYPES[: 1 if form in BARE else None]]
    late = written_content(form, "It is late.")
    cases: list[tuple[dict[str, Any], list[str], list[str]]] = [
        ({"choice": "required"}, [written(form, weather), written(form, time, weather)], [late, "", *wrong]),
        ({"choice": "required", "parallel_tool_calls": False}, [written(form, time)], [written(form, time, weather)]),
        ({"choice": "weather"}, [written(form, weather)], [written(form, time), written(form, weather, weather)]),
        ({"choice": "auto"}, [late, written(form, weather)], [written(form, OTHER_UNIT)]),
    ]  # fmt: skip
    for options, good, bad in cases:
        reply, grammar = prepared(model, request(WEATHER, TIME, **options))
        for text in good:
            assert accepts(model, grammars, grammar, text), (options, text)
        for text in bad:
            assert not accepts(model, grammars, grammar, text), (options, text)
        parser = AnswerParser(reply.answer_format)
        read = parser.push(good[-1])
        read.add(parser.flush())
        assert [json.loads(call.arguments) for call in read.calls if call.name == "weather"] in (
            [json.loads(ULM)],
            [],
        )
        assert read.content == ""


@pytest.mark.parametrize("form", FORMATS)
def test_beside_structured_output_an_answer_calls_or_matches_it(
    thinking: TextModel, grammars: Grammars, form: str
) -> None:
    model = dataclasses.replace(thinking, tool_format=form, reasoning_format="")
    weather, time = WEATHER_CALL, TIME_CALL
    loose = Tool(
        name="loose", parameters_json='{"type": "object", "properties": {"a": {"not": {}}}}'
    )
    person = {
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    for output, match in (
        (StructuredOutput(json_schema=json.dumps({"type": "object"} | person)), '{"name": "Ada"}'),
        (StructuredOutput(regex="[0-9]+"), "7"),
        (StructuredOutput(grammar='start: "yes" | "no"'), "no"),
    ):
        sampling = Sampling(structured_output=output)
        for choice in (None, "auto"):
            _, grammar = prepared(
                model, request(WEATHER, TIME, loose, choice=choice, sampling=sampling)
            )
            printed = written_content(form, match)
            for text in (printed, written(form, weather), written(form, time, weather)):
                assert accepts(model, grammars, grammar, text), (choice, text)
            for text in (
                written_content(form, "It is late."),
                printed + written(form, time),
                written(form, OTHER_UNIT),
            ):
                assert not accepts(model, grammars, grammar, text), (choice, text)
        for more in (
            {"choice": "none"},
            {"allowed_tools": ["time"]},
            {"parallel_tool_calls": False},
        ):
            _, grammar = prepared(model, request(WEATHER, TIME, sampling=sampling, **more))
            assert accepts(model, grammars, grammar, written_content(form, match)), more
            assert accepts(model, grammars, grammar, written(form, time)) == (
                more != {"choice": "none"}
            ), more
            assert not accepts(model, grammars, grammar, written(form, time, weather)), more


@pytest.mark.parametrize("form", FORMATS)
def test_the_text_of_a_custom_tool_matches_also_where_it_need_not_be_called(
    thinking: TextModel, grammars: Grammars, form: str
) -> None:
    model = dataclasses.replace(thinking, tool_format=form, reasoning_format="")
    for kind, definition in (
        ("regex", r'say "[a-c]+"\n'),
        ("lark", 'start: "say " /"[a-c]+"/ "\\n"'),
        (None, ""),
    ):
        code = Tool(name="code", custom_input=CustomInput(**({kind: definition} if kind else {})))
        good, bad = (
            written(form, ("code", {"input": text})) for text in ('say "abc"\n', "say abc")
        )
        for choice in ("auto", "required", "code"):
            reply, grammar = prepared(model, request(code, TIME, choice=choice))
            if choice == "auto" and kind is None:
                assert grammar == ""
                continue
            assert accepts(model, grammars, grammar, good), (choice, kind)
            assert accepts(model, grammars, grammar, bad) == (kind is None), (choice, kind)
            assert accepts(model, grammars, grammar, written_content(form, "It is late.")) == (
                choice == "auto"
            )
            parser = AnswerParser(reply.answer_format)
            assert [call.arguments for call in parser.push(good).calls] == ['say "abc"\n']


def test_content_behind_thoughts_stands_in_the_frame_of_its_format(
    thinking: TextModel, grammars: Grammars
) -> None:
    model = dataclasses.replace(thinking, tool_format="gpt_oss", reasoning_format="gpt_oss")
    sampling = Sampling(structured_output=StructuredOutput(regex="[0-9]+"))
    reply, grammar = prepared(model, request(sampling=sampling))
    thoughts = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    for text in ("<|channel|>final<|message|>7", f"{thoughts}<|channel|>final<|message|>7"):
        assert accepts(model, grammars, grammar, text), text
        parser = AnswerParser(reply.answer_format)
        read = parser.push(text)
        read.add(parser.flush())
        assert read.content == "7"
    for text in ("7", f"{thoughts}7", f"{thoughts}<|channel|>final<|message|>x"):
        assert not accepts(model, grammars, grammar, text), text


def test_a_budget_of_thoughts_leaves_room_for_the_frame(
    thinking: TextModel, grammars: Grammars
) -> None:
    model = dataclasses.replace(thinking, tool_format="gpt_oss", reasoning_format="gpt_oss")
    for tools in ((), (TIME,)):
        _, grammar = prepared(model, request(*tools, sampling=Sampling(thinking_token_budget=8)))
        assert accepts(model, grammars, grammar, "<|channel|>final<|message|>It is late.")
        assert accepts(model, grammars, grammar, written("gpt_oss", TIME_CALL)) == bool(tools)


def test_digits_of_a_custom_tool_are_ascii(thinking: TextModel, grammars: Grammars) -> None:
    model = dataclasses.replace(thinking, tool_format="hermes", reasoning_format="")
    for asked in (CustomInput(regex=r"\d+"), CustomInput(lark=r"start: /\d+/")):
        _, grammar = prepared(
            model, request(Tool(name="code", custom_input=asked), choice="required")
        )
        assert accepts(model, grammars, grammar, written("hermes", ("code", {"input": "12"})))
        assert not accepts(model, grammars, grammar, written("hermes", ("code", {"input": "٣"})))


def test_a_pythonic_call_of_a_tool_that_is_not_strict_has_any_arguments(
    thinking: TextModel, grammars: Grammars
) -> None:
    model = dataclasses.replace(thinking, tool_format="pythonic", reasoning_format="")
    loose = Tool(
        name="loose", parameters_json='{"type": "object", "properties": {"a": {"type": "string"}}}'
    )
    _, grammar = prepared(model, request(WEATHER, loose))
    for written in ("a=')', b=[1, {'c': 2}]", "user-id=7", ""):
        assert accepts(model, grammars, grammar, f"[loose({written})]")
    assert not accepts(model, grammars, grammar, "[loose(1)]"), "an argument without a name"
    assert not accepts(model, grammars, grammar, "[loose(a=')]")


@pytest.mark.parametrize("required", [[], ["p7"]])
def test_a_pythonic_call_has_any_of_many_optional_arguments(
    thinking: TextModel, grammars: Grammars, required: list[str]
) -> None:
    """A grammar with a rule for each set of optional arguments would have megabytes."""
    model = dataclasses.replace(thinking, tool_format="pythonic", reasoning_format="")
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "boolean"} for i in range(14)},
        "required": required,
    }
    tool = Tool(name="f", parameters_json=json.dumps(schema), strict=True)
    _, grammar = prepared(model, request(tool, choice="f"))
    assert len(grammar) < 5_000
    before = [f"{name}=true" for name in required]
    for chosen in (
        [],
        [0],
        [13],
        [0, 1],
        [3, 5, 8, 12],
        [i for i in range(14) if f"p{i}" not in required],
    ):
        values = [*before, *(f"p{i}=false" for i in chosen)]
        assert accepts(model, grammars, grammar, f"[f({', '.join(values)})]"), chosen
    for values in (["p2=true", "p1=true"], ["p1=true", "p1=true"], ["p1=3"], ["p1=true", ""]):
        assert not accepts(model, grammars, grammar, f"[f({', '.join([*before, *values])})]")


def test_tools_whose_grammar_no_engine_takes_are_refused(thinking: TextModel) -> None:
    """Each argument of a pythonic call has a schema of its own, with all definitions."""
    model = dataclasses.replace(thinking, tool_format="pythonic", reasoning_format="")
    names = {"$defs": {"name": {"enum": ["x" * 8_000]}}}
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"$ref": "#/$defs/name"} for i in range(150)},
        **names,
    }
    with pytest.raises(
        BadRequest, match="the grammar of tools has more than 1048576 bytes"
    ) as refused:
        prepared(model, request(Tool(name="f", parameters_json=json.dumps(schema)), choice="f"))
    assert refused.value.param == "tools"


def test_a_custom_tool_whose_grammar_no_engine_takes_is_refused(thinking: TextModel) -> None:
    model = dataclasses.replace(thinking, tool_format="hermes", reasoning_format="")
    tool = Tool(name="f", custom_input=CustomInput(lark="start: " + "~" * 10_000 + '"a"'))
    with pytest.raises(BadRequest, match="the grammar of tools has more than 1048576 bytes"):
        answer_grammar(
            model, request(tool, choice="f"), PrepareReply(answer_format={"tool_parser": "hermes"})
        )


def test_free_answers_have_no_grammar(thinking: TextModel) -> None:
    loose = Tool(
        name="loose", parameters_json='{"type": "object", "properties": {"a": {"not": {}}}}'
    )
    for asked in (
        request(),
        request(loose),
        request(TIME),
        request(TIME, choice="auto"),
        request(WEATHER, choice="none"),
    ):
        assert prepared(thinking, asked)[1] == ""


@pytest.mark.parametrize("opens", [False, True])
def test_the_grammar_of_an_answer_begins_behind_the_thoughts(
    thinking: TextModel, grammars: Grammars, opens: bool
) -> None:
    sampling = Sampling(structured_output=StructuredOutput(regex="[0-9]+"))
    kwargs = {"chat_template_kwargs_json": '{"opens_thoughts": true}'} if opens else {}
    reply, grammar = prepared(thinking, request(sampling=sampling, **kwargs))
    assert reply.answer_format.starts_in_reasoning == opens
    opening = "" if opens else "<think>"
    assert accepts(thinking, grammars, grammar, f"{opening}seven, I think</think>\n\n7")
    assert not accepts(thinking, grammars, grammar, f"{opening}seven</think>seven")
    assert accepts(thinking, grammars, grammar, "7") == (not opens)
    told_not_to = prepared(thinking, request(sampling=sampling, reasoning_effort="none"))
    assert not told_not_to[0].HasField("answer_format")
    assert accepts(thinking, grammars, told_not_to[1], "7")


def test_constrained_content_without_thoughts_begins_with_its_first_character(
    thinking: TextModel, grammars: Grammars
) -> None:
    choice = StructuredOutput(choice=StructuredOutput.Choices(choices=["yes"]))
    reply, grammar = prepared(thinking, request(sampling=Sampling(structured_output=choice)))
    assert reply.answer_format.reasoning_parser
    assert accepts(thinking, grammars, grammar, "yes")
    # The parser leaves out white space behind thoughts only.
    assert accepts(thinking, grammars, grammar, "<think>\nso</think>\n yes")
    for space in (" ", "\n", "\n "):
        ids = thinking.tokenizer.encode(space, add_special_tokens=False)
        assert grammars.compile(grammar).try_consume_tokens(ids) == 0, space


@pytest.mark.parametrize("choice", [" yes", "<think>yes"])
def test_a_choice_that_would_be_read_as_thoughts_is_refused(
    choice: str, thinking: TextModel
) -> None:
    output = StructuredOutput(choice=StructuredOutput.Choices(choices=["no", choice]))
    asked = Sampling(structured_output=output)
    with pytest.raises(BadRequest, match="begin neither with white space nor") as refused:
        prepared(thinking, request(sampling=asked))
    assert refused.value.param == "structured_output.choice"
    assert prepared(thinking, request(sampling=asked, reasoning_effort="none"))[1]


def test_parameters_that_nothing_finite_matches_are_refused_by_their_field(
    thinking: TextModel,
) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tool = Tool(name="f", parameters_json=json.dumps(endless))
    with pytest.raises(BadRequest, match="nothing that ends matches it") as refused:
        prepared(thinking, request(TIME, tool, choice="required"))
    assert refused.value.param == "tools[1].function.parameters"
    rule = Tool(name="g", custom_input=CustomInput(lark='start: "a" start'))
    with pytest.raises(BadRequest, match="its rule 'start' never ends") as refused:
        prepared(thinking, request(rule, choice="required"))
    assert refused.value.param == "tools[0].custom.format.grammar.definition"


def test_a_budget_ends_the_thoughts_and_leaves_the_answer_free(
    thinking: TextModel, grammars: Grammars
) -> None:
    opened = {"chat_template_kwargs_json": '{"opens_thoughts": true}'}
    _, grammar = prepared(thinking, request(sampling=Sampling(thinking_token_budget=4), **opened))
    assert accepts(thinking, grammars, grammar, "one two three four</think>\nAnything.")
    assert accepts(thinking, grammars, grammar, "one</think> two three four five six")
    assert not accepts(thinking, grammars, grammar, "one two three four five</think>")
    calls = prepared(
        thinking,
        request(TIME, choice="required", sampling=Sampling(thinking_token_budget=0), **opened),
    )
    assert accepts(thinking, grammars, calls[1], "</think>" + written("hermes", TIME_CALL))
    assert not accepts(thinking, grammars, calls[1], "so</think>" + written("hermes", TIME_CALL))


@pytest.mark.parametrize("budget", [2**31, 2**32 - 1])
def test_a_budget_may_be_larger_than_any_context(
    thinking: TextModel, grammars: Grammars, budget: int
) -> None:
    _, grammar = prepared(thinking, request(sampling=Sampling(thinking_token_budget=budget)))
    assert accepts(thinking, grammars, grammar, "<think>hm</think>Hello")


def test_a_budget_ends_thoughts_whose_end_is_spelled_by_several_tokens(
    demo_model: TextModel, demo_folder: Path
) -> None:
    grammars = grammars_of(demo_folder)
    plain = dataclasses.replace(demo_model, reasoning_format="deepseek_r1")
    digits = StructuredOutput(regex="[0-9]+")
    for budget, good, bad in [
        (4, ["</think>7", "one two three four</think>\n\n7", "a < b</div></think>7"], ["one two "
                                                                                       "three "
                                                                                       "four five</think>7"]),
        (4, [], ["one</think>seven", "one</think> two</think>7", "one two three four<b></think>7"]),
        (0, ["</think>7"], ["one</think>7"]),
        (30_000, [" word" * 900 + "</think>7"], []),
    ]:  # fmt: skip
        _, grammar = prepared(
            plain,
            request(sampling=Sampling(thinking_token_budget=budget, structured_output=digits)),
        )
        for text in good:
            assert accepts(plain, grammars, grammar, text), (budget, text[-40:])
        for text in bad:
            assert not accepts(plain, grammars, grammar, text), (budget, text)


@pytest.mark.parametrize("form", FORMATS)
def test_an_enforced_call_wins_over_structured_output(
    thinking: TextModel, grammars: Grammars, form: str
) -> None:
    model = dataclasses.replace(thinking, tool_format=form, reasoning_format="")
    weather, time = WEATHER_CALL, TIME_CALL
    for output, match in (
        (StructuredOutput(json_object=True), '{"a": 1}'),
        (StructuredOutput(regex="[0-9]+"), "7"),
        (StructuredOutput(structural_tag='{"format": {"type": "any_text"}}'), "It is late."),
    ):
        sampling = Sampling(structured_output=output)
        for choice, good in (
            ("required", written(form, time, weather)),
            ("weather", written(form, weather)),
        ):
            _, grammar = prepared(model, request(WEATHER, TIME, choice=choice, sampling=sampling))
            assert accepts(model, grammars, grammar, good), (output, choice)
            assert not accepts(model, grammars, grammar, match), (output, choice)


def test_only_tools_that_are_allowed_are_called(thinking: TextModel, grammars: Grammars) -> None:
    for form in TOOL_FORMATS:
        model = dataclasses.replace(thinking, tool_format=form, reasoning_format="")
        weather, time = WEATHER_CALL, TIME_CALL
        for choice in ("auto", "required"):
            _, grammar = prepared(
                model, request(WEATHER, TIME, choice=choice, allowed_tools=["time"])
            )
            assert accepts(model, grammars, grammar, written(form, time)), (form, choice)
            assert not accepts(model, grammars, grammar, written(form, weather)), (form, choice)
            late = written_content(form, "It is late.")
            assert accepts(model, grammars, grammar, late) == (choice == "auto")


def test_a_model_without_thoughts_keeps_an_optional_budget_of_them(demo_model: TextModel) -> None:
    sampling = Sampling(thinking_token_budget=4)
    for tools in ((), (TIME,)):
        asked = request(*tools, sampling=sampling, thoughts_are_optional=True)
        assert prepared(demo_model, asked)[1] == ""


def test_what_cannot_be_held_to_is_refused(thinking: TextModel, demo_model: TextModel) -> None:
    endless = Sampling(ignore_eos=True)
    no_schema = Sampling(structured_output=StructuredOutput(json_schema="{"))
    tags = Sampling(
        structured_output=StructuredOutput(structural_tag='{"format": {"type": "any_text"}}')
    )
    bad = Tool(
        name="bad",
        parameters_json='{"type": "object", "properties": {"a": {"not": {}}}}',
        strict=True,
    )
    not_json = Tool(name="bad", parameters_json="{", strict=True)
    cases: list[tuple[TextModel, PrepareRequest, str, str]] = [
        (
            thinking,
            request(TIME, choice="required", sampling=no_schema),
            "structured_output.json_schema",
            "JSON",
        ),
        (thinking, request(WEATHER, sampling=tags), "tools", "beside structured output"),
        (thinking, request(bad, choice="required"), "tools[0].function.parameters", "not"),
        (thinking, request(not_json), "tools[0].function.parameters", "JSON"),
        (thinking, request(Tool(name="a b")), "tools[0].function.name", "letters, digits"),
        (thinking, request(TIME, TIME), "tools[1].function.name", "names that differ"),
        (
            thinking,
            request(TIME, allowed_tools=["tide"]),
            "tool_choice",
            "allowed tools of ['time']",
        ),
        (
            thinking,
            request(TIME, WEATHER, choice="weather", allowed_tools=["time"]),
            "tool_choice",
            "one of",
        ),
        (
            thinking,
            request(TIME, choice="required", sampling=endless),
            "ignore_eos",
            "with tool_choice",
        ),
        (thinking, request(WEATHER, sampling=endless), "ignore_eos", "with tools"),
        (
            thinking,
            request(sampling=Sampling(ignore_eos=True, thinking_token_budget=4)),
            "ignore_eos",
            "thinking_token_budget",
        ),
        (thinking, request(reasoning_effort="some"), "reasoning_effort", "minimal"),
        (
            demo_model,
            request(sampling=Sampling(thinking_token_budget=4)),
            "thinking_token_budget",
            "no thoughts",
        ),
    ]
    for model, asked, param, words in cases:
        with pytest.raises(BadRequest) as refused:
            prepared(model, asked)
        assert (refused.value.param or "").startswith(param)
        assert words in refused.value.message
    assert prepared(thinking, request(TIME, sampling=endless))[1] == ""


def test_arguments_that_a_function_does_not_name_are_not_invented(
    thinking: TextModel, grammars: Grammars
) -> None:
    named = {"type": "object", "properties": {"city": {"type": "string"}}}
    for schema, is_open in (
        (named, False),
        (named | {"additionalProperties": True}, True),
        ({"type": "object"}, True),
    ):
        tool = Tool(name="f", parameters_json=json.dumps(schema))
        _, grammar = prepared(thinking, request(tool, choice="required", reasoning_effort="none"))
        call = '<tool_call>\n{"name": "f", "arguments": {"town": "Ulm"}}\n</tool_call>'
        assert accepts(thinking, grammars, grammar, call) == is_open
    _, grammar = prepared(
        thinking, request(Tool(name="f"), choice="required", reasoning_effort="none")
    )
    assert not accepts(thinking, grammars, grammar, call)
    assert accepts(thinking, grammars, grammar, call.replace('"town": "Ulm"', ""))


def test_a_function_called_as_a_word_of_tool_choice_is_called_by_name(
    thinking: TextModel, grammars: Grammars
) -> None:
    for name in ("auto", "none", "required"):
        asked = request(
            TIME, Tool(name=name), choice=name, tool_choice_is_name=True, reasoning_effort="none"
        )
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        for text, is_taken in (
            (call, True),
            (call.replace(name, "time"), False),
            ("It is late.", False),
        ):
            assert accepts(thinking, grammars, prepared(thinking, asked)[1], text) == is_taken, text


def test_arguments_are_an_object_whatever_other_types_their_schema_has(
    thinking: TextModel, grammars: Grammars
) -> None:
    tool = Tool(name="f", parameters_json='{"type": ["object", "null"], "properties": {"a": {}}}')
    _, grammar = prepared(thinking, request(tool, choice="required", reasoning_effort="none"))
    for arguments, is_taken in (("{}", True), ('{"a": null}', True), ("null", False)):
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(thinking, grammars, grammar, call) == is_taken, arguments


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "keywords", ['"properties": "#/"', '"properties": [1]', '"required": true', '"required": 1']
)
def test_parameters_whose_keywords_are_of_other_types_are_refused(
    thinking: TextModel, form: str, keywords: str
) -> None:
    model = dataclasses.replace(thinking, tool_format=form, reasoning_format="")
    tool = Tool(name="f", parameters_json=f'{{"type": "object", {keywords}}}')
    with pytest.raises(BadRequest, match="a JSON Schema of an object"):
        prepared(model, request(tool, choice="required"))


def test_objects_of_an_answer_are_closed_where_the_deployment_or_the_request_says_so(
    thinking: TextModel,
) -> None:
    schema = json.dumps(
        {"type": "object", "properties": {"city": {"type": "object", "properties": {}}}}
    )
    for closes, strict in ((True, None), (True, False), (False, True), (False, None)):
        model = load_text_model(thinking.folder, "thinking", ServingChoices(close_schemas=closes))
        output = StructuredOutput(json_schema=schema, strict=strict)
        _, grammar = prepared(model, request(sampling=Sampling(structured_output=output)))
        assert grammar.count('"additionalProperties": false') == (2 if closes or strict else 0), (
            closes,
            strict,
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"choice": "required"}, "tool_choice with use_beam_search"),
        ({"choice": "time"}, "tool_choice with use_beam_search"),
        ({"choice": "auto"}, "tools with use_beam_search"),
    ],
)
def test_calls_that_a_grammar_holds_are_refused_with_a_beam_search(
    thinking: TextModel, options: dict[str, Any], says: str
) -> None:
    sampling = Sampling(use_beam_search=True, best_of=2, max_tokens=8)
    with pytest.raises(BadRequest, match=says):
        prepared(thinking, request(WEATHER, TIME, sampling=sampling, **options))
    _, grammar = prepared(thinking, request(TIME, choice="auto", sampling=sampling))
    assert not grammar


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm47"])
def test_an_answer_behind_a_budget_of_thoughts_may_call(
    thinking: TextModel, grammars: Grammars, form: str
) -> None:
    assert "<tool_call>" in thinking.tokenizer.special_texts
    model = dataclasses.replace(thinking, tool_format=form)
    sampling = Sampling(thinking_token_budget=8)
    _, grammar = prepared(model, request(Tool(name="time"), choice="auto", sampling=sampling))
    for text in ("<think>So</think>It is late.", "It is late.", written(form, TIME_CALL)):
        assert accepts(model, grammars, grammar, text), text
    assert accepts(model, grammars, grammar, "<think>So</think>" + written(form, TIME_CALL))
