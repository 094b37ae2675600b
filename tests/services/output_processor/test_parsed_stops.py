"""Stop strings in answers that have a format: they end content and calls, never thoughts or
marks."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.proto.common_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    AnswerFormat,
    Sampling,
)
from headwater.services.answers.parts import Parts
from headwater.services.output_processor.parsed_answer import ParsedAnswer
from headwater.services.output_processor.stops import Stops
from tests.services.output_processor.conftest import Line

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "time", "arguments": {"a": "abc STOP d"}}\n</tool_call>',
    "llama3_json": '{"name": "time", "parameters": {"a": "abc STOP d"}}',
    "mistral": '[TOOL_CALLS][{"name": "time", "arguments": {"a": "abc STOP d"}}]',
    "pythonic": '[time(a="abc STOP d")]',
}
IN_MARKS = {
    "hermes": ["<tool", "\n", '"name"', "time", "argu", "}}", "}\n<"],
    "llama3_json": ['"name"', "time", "param", "}}"],
    "mistral": ["[TOOL", "[", '"name"', "time", "argu", "}}]", "]"],
    "pythonic": ["[", "time", "(", "=", ")]"],
}
IN_JSON = ["{", '"', '"a"', ": ", '": "a', "}"]
"""Stop strings in the punctuation of arguments, or across it."""
THINKING_CALLER = AnswerFormat(tool_parser="hermes", tool_names=["time"], reasoning_parser="think")
THOUGHT = "<think>Hm, I think.</think>\n"


def caller(parser: str, **more: object) -> AnswerFormat:
    return AnswerFormat(tool_parser=parser, tool_names=["time"], **more)  # type: ignore[arg-type]


def read(answer: ParsedAnswer, pieces: list[str]) -> Parts:
    parts = Parts()
    for piece in pieces:
        if not answer.is_over:
            parts.add(answer.push(piece))
    parts.add(answer.flush())
    return parts


@pytest.mark.parametrize("parser", WRITTEN)
@pytest.mark.parametrize("is_single", [False, True], ids=["any number of calls", "one call"])
def test_a_stop_string_cuts_the_call_in_whose_arguments_it_stands(
    parser: str, is_single: bool
) -> None:
    for pieces in ([WRITTEN[parser]], list(WRITTEN[parser])):
        answer = ParsedAnswer(caller(parser, single_call=is_single), Stops.compile(["STOP"]))
        [call] = read(answer, pieces).calls
        assert (call.name, call.arguments) == ("time", '{"a": "abc ')
        assert (answer.hit, answer.has_cut_call) == ("STOP", True)


@pytest.mark.parametrize("parser", WRITTEN)
def test_a_stop_string_that_only_marks_contain_cuts_no_call(parser: str) -> None:
    for stop in [*IN_MARKS[parser], *IN_JSON]:
        answer = ParsedAnswer(caller(parser), Stops.compile([stop]))
        [call] = read(answer, list(WRITTEN[parser])).calls
        assert json.loads(call.arguments) == {"a": "abc STOP d"}
        assert (answer.hit, answer.has_cut_call) == (None, False), stop


@pytest.mark.parametrize("parser", WRITTEN)
def test_a_call_is_cut_where_its_arguments_have_no_end(parser: str) -> None:
    written = WRITTEN[parser]
    answer = ParsedAnswer(caller(parser), None)
    for i, char in enumerate(written):
        answer.push(char)
        is_whole = written[: i + 1].endswith(('d"}', 'd")'))
        if is_whole:
            break
        assert answer.has_cut_call == answer.has_called, written[: i + 1]
    assert (answer.has_called, answer.has_cut_call) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "stop", "reported"),
    [
        ('{"ab": "ab"}', "ab", '{"ab": "'),
        ('{"ab": ["", {"c": "ab"}]}', "ab", '{"ab": ["", {"c": "'),
        ('{"ab": 1, "c": [2, "x", "ab"]}', "ab", '{"ab": 1, "c": [2, "x", "'),
        (r'{"c": "a\\b"}', "b", r'{"c": "a\\'),
        (r'{"c": "a\nb"}', "n", r'{"c": "a\nb"}'),
        (r'{"c": "a\u00abc\"ab"}', "ab", r'{"c": "a\u00abc\"'),
        ('{"c": "a", "d": "b"}', "ab", '{"c": "a", "d": "b"}'),
        ('{"c": 42}', "42", '{"c": 42}'),
    ],
)
def test_arguments_end_at_a_stop_string_in_one_of_their_string_values(
    arguments: str, stop: str, reported: str
) -> None:
    answer = ParsedAnswer(caller("hermes"), Stops.compile([stop]))
    written = f'<tool_call>{{"name": "time", "arguments": {arguments}}}</tool_call>'
    [call] = read(answer, [written]).calls
    assert (call.arguments, answer.has_cut_call) == (reported, reported != arguments)


def test_text_behind_a_call_ends_at_a_stop_string_and_leaves_the_call_whole() -> None:
    answer = ParsedAnswer(caller("hermes"), Stops.compile(["STOP"]))
    call = '<tool_call>{"name": "time"}</tool_call>'
    parts = read(answer, [f"Wait. {call} Now ST{call}op STOP {call}"])
    assert [each.index for each in parts.calls] == [0, 1]
    assert (parts.content, answer.hit, answer.has_cut_call) == ("Wait. Now STop ", "STOP", False)


def test_the_text_of_a_custom_tool_ends_at_a_stop_string() -> None:
    form = caller("hermes", custom_names=["time"])
    answer = ParsedAnswer(form, Stops.compile(["\n\n"]))
    text = json.dumps({"input": "a\nb\n\nc"})
    parts = read(answer, [f'<tool_call>{{"name": "time", "arguments": {text}}}</tool_call>'])
    assert [(call.arguments, call.is_text) for call in parts.calls] == [("a\nb", True)]
    assert answer.has_cut_call


@pytest.mark.parametrize("parser", WRITTEN)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="<tool_call>{}[]\"'\\(),:;= \naTOL_CALLSname|python_tag>", max_size=60),
    strings=st.lists(st.text(alphabet='a{" }\nt,', min_size=1, max_size=3), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 500), max_size=6),
    thinks=st.booleans(),
)
def test_where_an_answer_ends_does_not_depend_on_how_its_text_was_cut(
    parser: str, text: str, strings: list[str], places: list[int], thinks: bool
) -> None:
    form = AnswerFormat(
        tool_parser=parser, tool_names=["a"], reasoning_parser="think" if thinks else ""
    )
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    reported = []
    for each in ([text], pieces, list(text)):
        answer = ParsedAnswer(form, Stops.compile(strings))
        parts = read(answer, each)
        reported.append((parts, answer.hit, answer.has_cut_call))
    assert reported[0] == reported[1] == reported[2]
    parts, hit, _ = reported[0]
    without = read(ParsedAnswer(form, None), [text])
    if hit is None:
        assert parts == without
    else:
        assert without.content.startswith(parts.content)
        assert all(
            whole.arguments.startswith(cut.arguments)
            for cut, whole in zip(parts.calls, without.calls, strict=False)
        )


@pytest.mark.parametrize("at_once", [1, 5, 60])
async def test_a_call_that_a_stop_string_cuts_ends_its_answer_with_stop(
    line: Line, at_once: int
) -> None:
    [number] = await line.open(
        1, answer_format=THINKING_CALLER, sampling=Sampling(stop=["STOP", "hink"])
    )
    ids = line.ids(THOUGHT + WRITTEN["hermes"] + " and on")
    for first in range(0, len(ids), at_once):
        line.engine.send_tokens({number: ids[first : first + at_once]}, first=first)
    finish = await line.gateway.finish(1)
    received = line.gateway.received[1]
    assert (received.reasoning, received.text) == ("Hm, I think.", "")
    assert "".join(call.arguments for call in received.calls) == '{"a": "abc '
    assert (finish.reason, finish.stop_string, finish.has_cut_call) == (
        FINISH_REASON_STOP,
        "STOP",
        True,
    )
    # The tokens end with the one that completes the stop string, however many came at once.
    assert line.tokenizer.decode(received.token_ids).rstrip().endswith("STOP")
    await line.engine.receives(lambda: number in line.engine.cancels)


async def test_a_call_that_the_end_of_the_answer_cuts_is_no_reason_for_its_end(line: Line) -> None:
    [number] = await line.open(1, answer_format=THINKING_CALLER)
    line.engine.send_tokens({number: line.ids('<tool_call>{"name": "time", "arguments": {"a": ')})
    line.engine.send_finish(number, FINISH_REASON_STOP)
    finish = await line.gateway.finish(1)
    assert (finish.reason, finish.has_cut_call) == (FINISH_REASON_STOP, True)


async def test_a_stop_string_in_thoughts_and_marks_alone_ends_nothing(line: Line) -> None:
    stops = ["hink", "</", "tool", '"name"', "Hm"]
    [number] = await line.open(1, answer_format=THINKING_CALLER, sampling=Sampling(stop=stops))
    line.engine.send_tokens({number: line.ids(THOUGHT + "Wait. " + WRITTEN["hermes"])})
    line.engine.send_finish(number, FINISH_REASON_STOP)
    finish = await line.gateway.finish(1)
    received = line.gateway.received[1]
    assert (received.reasoning, received.text) == ("Hm, I think.", "Wait.")
    assert (finish.reason, finish.has_cut_call) == (FINISH_REASON_TOOL_CALLS, False)


@pytest.mark.parametrize("num_delivered", [4, 20, 40, 200])
async def test_a_resumed_answer_ends_at_the_stop_string_where_the_first_attempt_would(
    line: Line, num_delivered: int
) -> None:
    form = {"answer_format": THINKING_CALLER, "sampling": Sampling(stop=["STOP"])}
    ids = line.ids(THOUGHT + WRITTEN["hermes"])[:-4]
    num_delivered = min(num_delivered, len(ids))
    [number] = await line.open(1, **form)
    line.engine.send_tokens({number: ids})
    whole = await line.gateway.finish(1)

    [number] = await line.open(2, **form)
    line.engine.send_tokens({number: ids[:num_delivered]})
    line.engine.send_finish(number, FINISH_REASON_ERROR)
    await line.gateway.finish(2)
    before = line.gateway.received[2]
    resumed = {
        "output_ids": ids[:num_delivered],
        "num_output_tokens": num_delivered,
        "delivered": [before.num_bytes],
    }
    await line.gateway.send(line.gateway.opening(3, **form, **resumed))
    if before.num_bytes < len((THOUGHT + WRITTEN["hermes"]).split("STOP")[0]):
        number = (await line.engine.add(2)).stream_ids[0]
        line.engine.send_tokens({number: ids[num_delivered:]}, first=num_delivered)
    finish = await line.gateway.finish(3)
    received = [before, line.gateway.received[3]]
    assert "".join(call.arguments for each in received for call in each.calls) == '{"a": "abc '
    assert (finish.reason, finish.stop_string) == (whole.reason, whole.stop_string)
    assert finish.num_output_tokens == whole.num_output_tokens


async def test_no_stop_string_is_looked_for_in_the_first_tokens(line: Line) -> None:
    ids = line.ids("STOP and STOP again")
    sampling = Sampling(stop=["STOP"], min_tokens=len(line.ids("STOP and")))
    [number] = await line.open(1, answer_format=caller("pythonic"), sampling=sampling)
    line.engine.send_tokens({number: ids})
    finish = await line.gateway.finish(1)
    assert (line.gateway.received[1].text, finish.stop_string) == ("STOP and ", "STOP")
