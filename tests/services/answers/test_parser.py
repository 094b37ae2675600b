"""Answers as models write them, cut in every way: what is told of them is the same, and arguments
are valid JSON."""
# ruff: noqa: E501 (answers stand here as models write them)

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.proto.common_pb2 import AnswerFormat
from headwater.services.answers.marked_formats import MARKED_FORMATS
from headwater.services.answers.parser import (
    TOOL_PARSER_NAMES,
    AnswerParser,
    call_id,
    markers_of,
)
from tests.services.answers.received_answer import ReceivedAnswer, cut, receive
from tests.services.answers.written_calls import WRITERS

NAMES = ["weather", "time", "get_user", "2fa-code"]
FORMATS = sorted(TOOL_PARSER_NAMES - MARKED_FORMATS.keys())
"""Formats whose arguments have types of their own; `test_marked_formats.py` tests the others."""
ULM = {
    "city": "Ulm",
    "note": 'a "quoted" } brace, </tool_call> and \\ in a string',
    "days": [1, 2.5, True, None],
}
ULM_JSON = json.dumps(ULM)


CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "Just an answer.\n", "Just an answer.\n", []),
    ("hermes", 'Look:\n<tool_call>\n{"name": "weather", "arguments": ' + ULM_JSON + "}\n</tool_call>", "Look:", [("weather", ULM)]),
    (
        "hermes",
        '<tool_call>{"name": "time"}</tool_call>\n<tool_call>{"arguments": {"id": 7}, "name": '
        '"get_user"}</tool_call> Done. ',
        "Done. ",
        [("time", {}), ("get_user", {"id": 7})],
    ),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"zone\\": \\"UTC\\"}"}</tool_call>', "", [("time", {"zone": "UTC"})]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}\n<tool_call>{"name": "time"}', "", [("time", {}), ("time", {})]),
    ("hermes", "2 < 3 <tool_call>is a tag</tool_call>", "2 < 3 <tool_call>is a tag</tool_call>", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", '<tool_call>\n<tool_call>{"name": "time"}</tool_call>', "<tool_call>", [("time", {})]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>\n<tool_call>\n{"nam', "", [("time", {})]),
    ("hermes", "a <tool_ca", "a <tool_ca", []),
    ("hermes", 'Hi. <tool_call>{"name": "time"}</tool_call>\n\n<tool_call>{"name": '
               '"time"}</tool_call>\nBye. ', "Hi. Bye. ", [("time", {}), ("time", {})]),
    ("hermes", '\nHi.<tool_call>{"name": "time"}</tool_call>\n \nBye.<tool_call>{"name": '
               '"time"}</tool_call>\n', "\nHi.\n \nBye.", [("time", {}), ("time", {})]),
    ("hermes", '\n<tool_call>{"name": "time"}</tool_call>\n\nBye.', "Bye.", [("time", {})]),
    ("gemma4", 'I look.\n<|tool_call>call:weather{city:<|"|>a "b", {c} \n<|"|>,days:[1,2.5,true,null],deep:{a:{b:<|"|><|"|>}}}<tool_call|>', "I look.", [("weather", {"city": 'a "b", {c} \n', "days": [1, 2.5, True, None], "deep": {"a": {"b": ""}}})]),
    ("gemma4", "<|tool_call>call:time{}<tool_call|><|tool_call>call:get_user{id: 7}<tool_call|>", "", [("time", {}), ("get_user", {"id": 7})]),
    ("gemma4", "<|tool_call>call:time{zone:UTC,at:None}", "", [("time", {"zone": "UTC", "at": None})]),
    ("gemma4", "See <|tool_call> here.", "See <|tool_call> here.", []),
    ("gemma4", "<|tool_call>call:ti", "<|tool_call>call:ti", []),
    ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ULM_JSON + "<|call|>", "", [("weather", ULM)]),
    ("gpt_oss", " to=functions.time<|channel|>commentary json<|message|>{}", "", [("time", {})]),
    ("gpt_oss", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>", "I look.", [("time", {})]),
    ("gpt_oss", "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|> Two.\n<|return|>", "One.\n Two.\n", []),
    ("gpt_oss", "<|channel|>commentary to=functions.time<|message|><|call|>", "", [("time", {})]),
    ("gpt_oss", "<|channel|>commentary to=python code<|message|>1 + 1<|call|>", "1 + 1", []),
    ("gpt_oss", "<|channel|>final<|message|>a <|sta", "a <|sta", []),
    ("gpt_oss", "Just an answer.", "Just an answer.", []),
    ("gpt_oss", "<|channel|>fin", "", []),
    ("granite_20b_fc", '<function_call> {"name": "time", "arguments": {}}<function_call> {"name": "get_user", "arguments": {"id": 1}}', "", [("time", {}), ("get_user", {"id": 1})]),
    ("internlm", 'I look.<|action_start|><|plugin|>\n{"name": "time", "arguments": {}}<|action_end|>\n', "I look.", [("time", {})]),
    ("gigachat3", 'I look.<|function_call|>{"name": "time", "arguments": {}}', "I look.", [("time", {})]),
    ("gigachat3", 'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "time", "arguments": {}}<|message_sep|>\n\n', "I look.", [("time", {})]),
    ("gigachat3", "Late.<|message_sep|>", "Late.", []),
    ("minimax_m1", 'I look.\n<tool_calls>\n{"name": "time", "arguments": {}}\n{"name": "get_user", "arguments": {"id": 1}}\n</tool_calls>', "I look.", [("time", {}), ("get_user", {"id": 1})]),
    ("apertus", '<|tools_prefix|>[{"time": {}}, {"weather": ' + ULM_JSON + "}]<|tools_suffix|>", "", [("time", {}), ("weather", ULM)]),
    ("apertus", '<|tools_prefix|>[{"ti', '{"ti', []),
    ("lfm2", 'I look. <|tool_call_start|>[weather(city="Ulm"), time()]<|tool_call_end|>\nSoon.', "I look. Soon.", [("weather", {"city": "Ulm"}), ("time", {})]),
    ("lfm2", "<|tool_call_start|>[weather(city='U\nlm', days=[1,\n2])]<|tool_call_end|>", "", [("weather", {"city": "U\nlm", "days": [1, 2]})]),
    ("lfm2", "See <|tool_call_start|>[1] here.", "See <|tool_call_start|>[1] here.", []),
    ("lfm2", "<|tool_call_start|>[ti", "<|tool_call_start|>[ti", []),
    ("lfm2", "<|tool_call_start|>[time(), ti", "", [("time", {})]),
    ("glm4", "\nweather\n" + ULM_JSON, "", [("weather", ULM)]),
    ("glm4", "I look.<|assistant|>time\n{}<|assistant|>get_user\n{\"id\": 1}", "I look.", [("time", {}), ("get_user", {"id": 1})]),
    ("glm4", "time is\n{not} on my side\n", "time is\n{not} on my side\n", []),
    ("glm4", "time", "time", []),
    ("glm4", "time\n{}<|assistant|>wea", "", [("time", {})]),
    ("glm4", "date\n{}", "date\n{}", []),
    ("functiongemma", "<start_function_call>call:time{zone:<escape>UTC<escape>}<end_function_call>", "", [("time", {"zone": "UTC"})]),
    ("llama3_json", '{"name": "weather", "parameters": ' + ULM_JSON + "}", "", [("weather", ULM)]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "time", "parameters": {}}; '
                    '{"name": "get_user", "parameters": {"id": 1}}', "", [("time", {}), ("get_user", {"id": 1})]),
    ("llama3_json", '\n{"name": "Ada", "age": 36}', '\n{"name": "Ada", "age": 36}', []),
    ("llama3_json", '{"answer": {"name": "time"}}', '{"answer": {"name": "time"}}', []),
    ("llama3_json", " It is late.", " It is late.", []),
    ("llama3_json", '{"name": "ti', '{"name": "ti', []),
    ("llama3_json", '{"name": "time", "parameters": {}}; {"name": "ti', "", [("time", {})]),
    ("mistral", 'Hm. [TOOL_CALLS] [{"name": "weather", "arguments": ' + ULM_JSON + '}, {"name": '
                                                                                   '"time", '
                                                                                   '"arguments": {}}]', "Hm.", [("weather", ULM), ("time", {})]),
    ("mistral", "[TOOL_CALLS]weather" + ULM_JSON + "[TOOL_CALLS]time{}", "", [("weather", ULM), ("time", {})]),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]" + ULM_JSON, "", [("weather", ULM)]),
    ("mistral", '[TOOL_CALLS] [{"name": "time", "arguments": {}}, {"nam', "", [("time", {})]),
    ("mistral", "[TOOL_CALLS]time{}[TOOL_CALLS]weat", "", [("time", {})]),
    ("mistral", "No [brackets] matter. [TOOL", "No [brackets] matter. [TOOL", []),
    ("nemotron", 'I look.\n<TOOLCALL>[{"name": "time", "arguments": {}}]</TOOLCALL>\n', "I look.", [("time", {})]),
    ("nemotron", "See <TOOLCALL> here.", "See <TOOLCALL> here.", []),
    ("phi4_mini", '<|tool_call|>[{"name": "time"}, {"nam', "", [("time", {})]),
    ("granite", '<|tool_call|>[{"arguments": {"id": 7}, "name": "get_user"}] ', "", [("get_user", {"id": 7})]),
    ("xlam", '[{"name": "time", "arguments": {}}, {"name": "get_user", "arguments": {"id": 1}}]', "", [("time", {}), ("get_user", {"id": 1})]),
    ("xlam", '[{"name": "Ada"}]', '[{"name": "Ada"}]', []),
    ("xlam", "[1, 2]", "[1, 2]", []),
    ("command", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "time", "parameters": {}}\n]<|END_ACTION|>', "", [("time", {})]),
    ("pythonic", "[weather(city='Ulm', note=\"a ) and ' b\", days=[1, 2.5, True, None], "
                 "deep={'a': (1, 2)}), time()]", "", [("weather", {"city": "Ulm", "note": "a "
                                                                                          ") and ' b", "days": [1, 2.5, True, None], "deep": {"a": [1, 2]}}), ("time", {})]),
    ("pythonic", "<|python_start|>[get_user(id=-7, active=true)]<|python_end|>", "", [("get_user", {"id": -7, "active": True})]),
    ("pythonic", "[1, 2] is a list.", "[1, 2] is a list.", []),
    ("pythonic", "[2fa-code(user-id=7, $top=1)]", "", [("2fa-code", {"user-id": 7, "$top": 1})]),
    ("pythonic", "[weathering(the storm)]", "[weathering(the storm)]", []),
    ("pythonic", "[time", "[time", []),
    ("pythonic", "[time(1)]", "[time(1)]", []),
    ("pythonic", "[time('UTC', 1)] is no call", "[time('UTC', 1)] is no call", []),
    ("pythonic", "[time(zone)]", "[time(zone)]", []),
    ("pythonic", "[time(  zone = 1 ), get_user(7)]", "", [("time", {"zone": 1})]),
    ("pythonic", "[time(zo", "[time(zo", []),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
@settings(max_examples=12, deadline=None)
@given(places=st.lists(st.integers(0, 500), max_size=12))
def test_calls_and_content_are_the_same_however_the_text_is_cut(
    parser: str, text: str, content: str, calls: list[tuple[str, Any]], places: list[int]
) -> None:
    answer_format = AnswerFormat(tool_parser=parser, tool_names=NAMES)
    for pieces in (cut(text, places), list(text), [text]):
        received = receive(answer_format, pieces)
        assert (received.content, received.calls) == (content, calls)


@pytest.mark.parametrize("parser", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="<tool_call>{}[]\"'\\(),:;= \naTOL_CALLSname|python_tag>", max_size=60),
    thinks=st.booleans(),
    places=st.lists(st.integers(0, 500), max_size=6),
)
def test_output_after_some_text_depends_on_that_text_alone(
    parser: str, text: str, thinks: bool, places: list[int]
) -> None:
    answer_format = AnswerFormat(
        tool_parser=parser, tool_names=["a"], reasoning_parser="think" if thinks else ""
    )
    pieces = cut(text, places)
    by_character = AnswerParser(answer_format)
    parser_ = AnswerParser(answer_format)
    received = ReceivedAnswer()
    expected = ReceivedAnswer()
    for piece in pieces:
        received.take(parser_.push(piece))
        for char in piece:
            expected.take(by_character.push(char))
        assert received == expected
    received.take(parser_.flush())
    expected.take(by_character.flush())
    assert received == expected


@pytest.mark.parametrize("parser", FORMATS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), places=st.lists(st.integers(0, 500), max_size=6))
def test_marks_in_any_order_are_read_alike_however_they_are_cut(
    parser: str, data: st.DataObject, places: list[int]
) -> None:
    form = AnswerFormat(tool_parser=parser, tool_names=NAMES)
    texts = ["call:time", "final", "analysis", " to=functions.time", '{"name": "time"}', *"{}[]:,<"]
    pieces = st.sampled_from([*markers_of(form), *texts]) | st.text(max_size=3)
    text = "".join(data.draw(st.lists(pieces, max_size=14)))
    received = receive(form, cut(text, places))
    assert received == receive(form, list(text))


arguments_of = st.dictionaries(
    st.text(alphabet="abcdefgh_", min_size=1, max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=12),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@pytest.mark.parametrize("parser", sorted(TOOL_PARSER_NAMES))
@settings(max_examples=10, deadline=None)
@given(data=st.data(), noise=st.lists(st.binary(max_size=24), min_size=1, max_size=6))
def test_random_bytes_between_marks_break_no_parser(
    parser: str, data: st.DataObject, noise: list[bytes]
) -> None:
    form = AnswerFormat(tool_parser=parser, tool_names=NAMES, reasoning_parser="think")
    marks = st.sampled_from(["", WRITERS[parser]([("weather", {})]), *markers_of(form), *NAMES])
    text = "".join(data.draw(marks) + each.decode(errors="replace") for each in noise)
    received = receive(form, [text])
    assert received == receive(form, list(text))
    assert all(received.names)


@pytest.mark.parametrize("parser", FORMATS)
@settings(max_examples=15, deadline=None)
@given(arguments=arguments_of, places=st.lists(st.integers(0, 1000), max_size=20))
def test_streamed_arguments_are_the_json_that_the_model_meant(
    parser: str, arguments: dict[str, Any], places: list[int]
) -> None:
    received = receive(
        AnswerFormat(tool_parser=parser, tool_names=NAMES),
        cut(WRITERS[parser]([("weather", arguments)] * 2), places),
    )
    assert received.calls == [("weather", arguments)] * 2
    assert received.content == ""


@pytest.mark.parametrize("parser", FORMATS)
def test_arguments_come_while_they_are_written(parser: str) -> None:
    written = WRITERS[parser]([("weather", {"city": "Ulm", "days": 3})])
    reader = AnswerParser(AnswerFormat(tool_parser=parser, tool_names=NAMES))
    received = ReceivedAnswer()
    received.take(reader.push(written[: written.index("days")]))
    assert received.names == ["weather"]
    assert received.arguments[0].startswith('{"city": "Ulm"')


@pytest.mark.parametrize(
    ("parser", "text", "name", "arguments"),
    [
        ("hermes", r'<tool_call>{"name": "\ud800"}</tool_call>', r"\ud800", "{}"),
        (
            "hermes",
            r'<tool_call>{"name": "time", "arguments": "\ud800"}</tool_call>',
            "time",
            r"\ud800",
        ),
        (
            "hermes",
            f'<tool_call>{{"name": "time", "arguments": {"[" * 9999}{"]" * 9999}}}',
            "time",
            "{}",
        ),
        ("pythonic", r'[time(zone="\ud800")]', "time", r'{"zone": "\ud800"}'),
    ],
    ids=[
        "half a character as a name",
        "as arguments",
        "lists in lists",
        "half a character in Python",
    ],
)
def test_text_that_no_message_can_carry_breaks_no_parser(
    parser: str, text: str, name: str, arguments: str
) -> None:
    received = receive(AnswerFormat(tool_parser=parser, tool_names=NAMES), [text])
    assert (received.names, received.arguments) == ([name], [arguments])
    assert f"{received.names}{received.arguments}".encode()


@pytest.mark.parametrize("begun", ["[time(", "[time(zone='UTC',"])
def test_white_space_in_a_pythonic_call_takes_linear_time(begun: str) -> None:
    before = time.thread_time()
    received = receive(
        AnswerFormat(tool_parser="pythonic", tool_names=NAMES), [begun, " " * 50_000, ")]"]
    )
    assert time.thread_time() - before < 2
    assert received.names == ["time"]


@pytest.mark.parametrize("parser", FORMATS)
def test_a_single_call_ends_the_answer(parser: str) -> None:
    reader = AnswerParser(AnswerFormat(tool_parser=parser, tool_names=NAMES, single_call=True))
    received = ReceivedAnswer()
    received.take(reader.push(WRITERS[parser]([("weather", {"city": "Ulm"})] * 2) + " more"))
    assert reader.is_over
    received.take(reader.flush())
    assert (received.calls, received.content) == ([("weather", {"city": "Ulm"})], "")


THOUGHTS: list[tuple[str, bool, str, str, str]] = [
    ("think", False, "<think>\nHm, so.\n</think>\n\nYes.\n", "Hm, so.", "Yes.\n"),
    ("think", False, "No thoughts </think> here.", "", "No thoughts </think> here."),
    ("think", True, "Hm, so.\n</think>\nYes. <think>", "Hm, so.", "Yes. <think>"),
    ("think", False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", False, "<think>never ends ", "never ends ", ""),
    ("deepseek_r1", True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("magistral", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    (
        "granite",
        False,
        "Here is my thought process: Hm.\nHere is my response: Yes.",
        "Hm.",
        "Yes.",
    ),
    (
        "granite",
        False,
        "Here's my thought process: Hm.\nHere's my response: Yes.",
        "Hm.",
        "Yes.",
    ),
    (
        "hunyuan_a13b",
        False,
        "<think>\nHm.\n</think>\n<answer>\nYes, \nI do.\n</answer>",
        "Hm.",
        "Yes, \nI do.",
    ),
    ("hunyuan_a13b", False, "<think>Hm.</think>\n <ans", "Hm.", "<ans"),
    ("granite33", False, "<think>Hm.</think><response>Yes.</response>", "Hm.", "Yes."),
    ("hy_v3", False, "<think:opensource>Hm.</think:opensource>Yes.", "Hm.", "Yes."),
    ("hunyuan_a13b", True, "Hm.</think>Yes.</answer>", "Hm.", "Yes.</answer>"),
    ("apertus", False, "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Hm.", "Yes."),
    ("think", False, "<thi", "", "<thi"),
]


@pytest.mark.parametrize(("parser", "starts_inside", "text", "reasoning", "content"), THOUGHTS)
@settings(max_examples=15, deadline=None)
@given(places=st.lists(st.integers(0, 500), max_size=8))
def test_thoughts_and_answer_are_the_same_however_the_text_is_cut(
    parser: str, starts_inside: bool, text: str, reasoning: str, content: str, places: list[int]
) -> None:
    answer_format = AnswerFormat(reasoning_parser=parser, starts_in_reasoning=starts_inside)
    for pieces in (cut(text, places), list(text), [text]):
        received = receive(answer_format, pieces)
        assert (received.reasoning, received.content) == (reasoning, content)
    answer_format.omit_reasoning = True
    assert receive(answer_format, [text]).reasoning == ""


def test_calls_are_looked_for_behind_the_thoughts_only() -> None:
    call = '<tool_call>{"name": "time"}</tool_call>'
    answer_format = AnswerFormat(tool_parser="hermes", tool_names=NAMES, reasoning_parser="think")
    received = receive(
        answer_format, [f"<think>I could say {call}.</think>", f"\nOne moment. {call}"]
    )
    assert received.reasoning == f"I could say {call}."
    assert (received.content, received.calls) == ("One moment.", [("time", {})])


def test_the_id_of_a_call_is_the_same_on_every_attempt_and_fits_its_family() -> None:
    assert call_id(AnswerFormat(tool_parser="hermes"), "r", 0, 1) == call_id(
        AnswerFormat(tool_parser="hermes"), "r", 0, 1
    )
    assert call_id(AnswerFormat(), "r", 0, 1) != call_id(AnswerFormat(), "r", 1, 1)
    for name in ("mistral", "mistral_tekken"):
        assert len(call_id(AnswerFormat(tool_parser=name), "r", 0, 0)) == 9


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I look.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Late."
)


@given(places=st.lists(st.integers(0, 500), max_size=12))
def test_thoughts_may_stand_between_messages_of_one_answer(places: list[int]) -> None:
    form = AnswerFormat(tool_parser="gpt_oss", reasoning_parser="gpt_oss", tool_names=NAMES)
    for pieces in (cut(HARMONY, places), [HARMONY]):
        received = receive(form, pieces)
        assert (received.reasoning, received.content) == ("Hm.\nSo.", "I look.\nLate.")
    form.omit_reasoning = True
    assert receive(form, [HARMONY]).reasoning == ""
    parser = AnswerParser(form)
    parser.push(HARMONY[: HARMONY.index("Hm.")])
    assert parser.is_reasoning
    parser.push(HARMONY[HARMONY.index("Hm.") :])
    assert not parser.is_reasoning


def test_without_tools_a_message_to_a_function_is_no_call() -> None:
    text = "<|channel|>commentary to=functions.time json<|message|>{}"
    received = receive(AnswerFormat(tool_parser="gpt_oss"), [text])
    assert (received.names, received.content) == ([], "{}")


def test_text_between_messages_is_part_of_none_however_it_is_cut() -> None:
    form = AnswerFormat(tool_parser="gpt_oss", tool_names=NAMES)
    for text in ("<|end|><|end|><|message|>a", "<|channel|>final<|message|>a<|end|>b<|message|>c"):
        assert receive(form, [text]) == receive(form, list(text))
        assert "<|message|>" not in receive(form, list(text)).content


@pytest.mark.parametrize("parser", FORMATS)
@settings(max_examples=15, deadline=None)
@given(
    text=st.text(max_size=20) | st.text(alphabet='\\"nu\n😀{}', max_size=20),
    places=st.lists(st.integers(0, 200), max_size=8),
)
def test_a_custom_tools_call_has_the_text_however_it_was_written_and_cut(
    parser: str, text: str, places: list[int]
) -> None:
    written = WRITERS[parser]([("time", {"input": text})])
    answer_format = AnswerFormat(tool_parser=parser, tool_names=NAMES, custom_names=["time"])
    for pieces in (cut(written, places), list(written), [written]):
        received = receive(answer_format, pieces)
        assert (received.names, received.arguments, received.content) == (["time"], [text], "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{ "input" : "a" }', "a"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"input": "a\nb\\qc"}', "a\nb\\qc"),
        ('{"input": "\\ud800x\\ud83d\\ude00"}', "\ufffdx😀"),
        ('{"input": "\\u00e9 \\"\\\\"}', 'é "\\'),
        ('{"input": "a\\u00', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"sql": "a"}', '{"sql": "a"}'),
        ('"a"', "a"),
        ("{}", ""),
    ],
)
def test_what_a_model_writes_otherwise_is_the_text_of_a_custom_tool(
    arguments: str, text: str
) -> None:
    answer_format = AnswerFormat(tool_parser="hermes", tool_names=NAMES, custom_names=["time"])
    end = "}</tool_call>" if arguments[-1] in '}"' else ""
    call = f'<tool_call>{{"name": "time", "arguments": {arguments}{end}'
    for pieces in (list(call), [call]):
        received = receive(answer_format, pieces)
        assert (received.names, received.arguments) == (["time"], [text])
