"""Thoughts and tool calls that an output processor tells apart from the content."""

from __future__ import annotations

import pytest

from headwater.proto.common_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    AnswerFormat,
)
from headwater.services.answers.parser import AnswerParser, call_id
from tests.services.output_processor.conftest import Line

THINKING_CALLER = AnswerFormat(tool_parser="hermes", tool_names=["time"], reasoning_parser="think")
CALL = (
    '<think>Hm, ä.</think>\nWait. <tool_call>\n{"name": "time", "arguments": {"zone": '
    '"UTC"}}\n</tool_call>'
)


async def test_thoughts_and_calls_come_beside_the_content(line: Line) -> None:
    [number] = await line.open(1, answer_format=THINKING_CALLER)
    ids = line.ids(CALL)
    for i, token_id in enumerate(ids):
        line.engine.send_tokens({number: [token_id]}, first=i)
    line.engine.send_finish(number, FINISH_REASON_STOP)
    finish = await line.gateway.finish(1)
    received = line.gateway.received[1]
    assert (received.text, received.reasoning, received.num_bytes) == (
        "Wait.",
        "Hm, ä.",
        len(CALL.encode()),
    )
    assert [call.name for call in received.calls] == ["time"] + [""] * (len(received.calls) - 1)
    assert received.calls[0].id.startswith("call_")
    assert "".join(call.arguments for call in received.calls) == '{"zone": "UTC"}'
    assert len(received.calls) > 3
    assert finish.reason == FINISH_REASON_TOOL_CALLS
    assert 0 < finish.num_reasoning_tokens < len(ids) // 2


@pytest.mark.parametrize("num_delivered", [0, 3, 12, 30, 60, 80])
async def test_a_resumed_answer_has_the_text_that_was_not_delivered(
    line: Line, num_delivered: int
) -> None:
    ids = line.ids(CALL)
    [number] = await line.open(1, answer_format=THINKING_CALLER, request_id="r")
    if num_delivered:
        line.engine.send_tokens({number: ids[:num_delivered]})
    line.engine.send_finish(number, FINISH_REASON_ERROR)
    await line.gateway.finish(1)
    before = line.gateway.received[1]
    output = {
        "num_output_tokens": num_delivered,
        "output_ids": ids[:num_delivered],
        "request_id": "r",
    }
    [number] = await line.open(
        2, answer_format=THINKING_CALLER, delivered=[before.num_bytes], **output
    )
    line.engine.send_tokens({number: ids[num_delivered:]}, first=num_delivered)
    line.engine.send_finish(number, FINISH_REASON_STOP)
    await line.gateway.finish(2)
    reported = [before, line.gateway.received[2]]
    assert "".join(each.reasoning for each in reported) == "Hm, ä."
    assert "".join(each.text for each in reported) == "Wait."
    assert "".join(call.arguments for each in reported for call in each.calls) == '{"zone": "UTC"}'
    assert {call.id for each in reported for call in each.calls if call.name} == {
        call_id(THINKING_CALLER, "r", 0, 0)
    }


async def test_one_call_is_enough_where_calls_are_not_parallel(line: Line) -> None:
    alone = AnswerFormat(tool_parser="hermes", tool_names=["time"], single_call=True)
    [number] = await line.open(1, answer_format=alone)
    line.engine.send_tokens(
        {number: line.ids('<tool_call>{"name": "time"}</tool_call> and on and on')}
    )
    finish = await line.gateway.finish(1)
    assert (finish.reason, line.gateway.received[1].text) == (FINISH_REASON_TOOL_CALLS, "")
    await line.engine.receives(lambda: number in line.engine.cancels)


@pytest.mark.parametrize("at_once", [3, 7, 60])
async def test_tokens_that_come_at_once_count_as_those_that_come_one_by_one(
    line: Line, at_once: int
) -> None:
    """As the tokens of accepted drafts do, some of them behind the end of the thoughts or of the
    only call."""
    alone = AnswerFormat(
        tool_parser="hermes", tool_names=["time"], reasoning_parser="think", single_call=True
    )
    ids = line.ids(CALL + " and on and on")
    reported = []
    for stream_id, step in ((1, 1), (2, at_once)):
        [number] = await line.open(stream_id, answer_format=alone)
        for first in range(0, len(ids), step):
            line.engine.send_tokens({number: ids[first : first + step]}, first=first)
        finish = await line.gateway.finish(stream_id)
        received = line.gateway.received[stream_id]
        reported.append(
            (
                finish.reason,
                finish.num_reasoning_tokens,
                received.token_ids,
                received.text,
                received.reasoning,
            )
        )
    assert reported[0] == reported[1]
    assert 0 < len(reported[0][2]) < len(ids)


async def test_long_arguments_go_in_frames_below_the_limit(line: Line) -> None:
    arguments = '{"text": "' + "hello " * 50_000 + '"}'
    [number] = await line.open(
        1, answer_format=AnswerFormat(tool_parser="hermes", tool_names=["time"])
    )
    ids = line.ids(f'<tool_call>{{"arguments": {arguments}, "name": "time"}}</tool_call>')
    for start in range(0, len(ids), 200):
        line.engine.send_tokens({number: ids[start : start + 200]}, first=start)
    line.engine.send_finish(number, FINISH_REASON_STOP)
    await line.gateway.finish(1)
    assert "".join(call.arguments for call in line.gateway.received[1].calls) == arguments


@pytest.mark.parametrize(
    "name", [r'"\ud800"', "[" * 2000 + "]" * 2000], ids=["half a character", "lists in lists"]
)
async def test_a_call_that_cannot_be_read_ends_no_other_stream(line: Line, name: str) -> None:
    [other] = await line.open(1)
    [number] = await line.open(
        2, answer_format=AnswerFormat(tool_parser="hermes", tool_names=["time"])
    )
    line.engine.send_tokens({number: line.ids(f'<tool_call>{{"name": {name}}}</tool_call>')})
    line.engine.send_finish(number, FINISH_REASON_STOP)
    assert (await line.gateway.finish(2)).error == ""
    line.engine.send_tokens({other: line.ids("still here")})
    line.engine.send_finish(other, FINISH_REASON_STOP)
    await line.gateway.finish(1)
    assert line.gateway.received[1].text == "still here"


@pytest.mark.parametrize("method", ["push", "flush"])
async def test_an_unforeseen_error_ends_its_stream_alone(
    line: Line, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(AnswerParser, method, fail)
    [other], [number] = await line.open(1), await line.open(2, answer_format=THINKING_CALLER)
    line.engine.send_tokens({number: line.ids("hello")})
    line.engine.send_finish(number, FINISH_REASON_STOP)
    finish = await line.gateway.finish(2)
    assert (finish.error, finish.retriable) == ("an internal fault; the log has it", False)
    if method == "push":
        # The resumed stream ends at once, before its engine gets the request.
        resumed = {
            "output_ids": line.ids("hello"),
            "num_output_tokens": len(line.ids("hello")),
            "delivered": [0],
        }
        await line.gateway.send(line.gateway.opening(3, answer_format=THINKING_CALLER, **resumed))
        assert (await line.gateway.finish(3)).error == finish.error
    line.engine.send_tokens({other: line.ids("still here")})
    line.engine.send_finish(other, FINISH_REASON_STOP)
    await line.gateway.finish(1)
    assert line.gateway.received[1].text == "still here"


async def test_an_unknown_parser_is_refused(line: Line) -> None:
    await line.gateway.send(
        line.gateway.opening(1, answer_format=AnswerFormat(tool_parser="morse"))
    )
    assert (await line.gateway.finish(1)).error == "the parser 'morse' is not known here"


@pytest.mark.parametrize("num_delivered", [6, 20])
async def test_thoughts_of_an_earlier_attempt_still_count(line: Line, num_delivered: int) -> None:
    ids = line.ids(CALL)
    counts = list[int]()
    for stream_id, num_resumed in ((1, 0), (2, num_delivered)):
        reported = len(line.tokenizer.decode(ids[:num_resumed]).encode())
        output = {"num_output_tokens": num_resumed, "output_ids": ids[:num_resumed]}
        [number] = await line.open(
            stream_id, answer_format=THINKING_CALLER, delivered=[reported], **output
        )
        for i in range(num_resumed, len(ids)):
            line.engine.send_tokens({number: [ids[i]]}, first=i)
        line.engine.send_finish(number, FINISH_REASON_STOP)
        counts.append((await line.gateway.finish(stream_id)).num_reasoning_tokens)
    assert counts[0] == counts[1] > 0
