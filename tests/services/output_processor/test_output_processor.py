from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest

from headwater.proto import output_processor_pb2_grpc
from headwater.proto.common_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    LOSS_CAUSE_MISSING,
    LOSS_CAUSE_SILENT,
    AnswerFormat,
    Sampling,
)
from headwater.proto.engine_pb2 import (
    AddPart,
    Cancel,
    Credit,
    EngineFrame,
    Finish,
    LogprobColumns,
    PromptLogprobs,
    Start,
)
from headwater.services.answers.parser import call_id
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.output_processor.__main__ import OutputProcessor
from headwater.services.output_processor.engines import EngineLinks
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.session import silence
from headwater.services.text.tokenizer import Tokenizer
from tests.services.output_processor.scripted_engine import (
    ListeningGateway,
    ScriptedEngine,
    listening_gateway,
    scripted_engine,
)


@dataclass
class Line:
    """An output processor between a scripted engine and a listening gateway."""

    servicer: OutputProcessor
    address: str
    engine: ScriptedEngine
    gateway: ListeningGateway
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def open(self, *stream_ids: int, **fields: object) -> list[int]:
        """Sends a request; returns the numbers that the engine knows its streams by."""
        num_adds = len(self.engine.adds)
        await self.gateway.send(self.gateway.opening(*stream_ids, **fields))  # type: ignore[arg-type]
        return list((await self.engine.add(num_adds)).stream_ids)


@pytest.fixture
async def line(demo_tokenizer: Tokenizer) -> AsyncIterator[Line]:
    async with scripted_engine() as engine, EngineLinks() as links:
        servicer, listener = OutputProcessor({DEMO_NAME: demo_tokenizer}, links), Listener("127.0.0.1", 0)
        output_processor_pb2_grpc.add_OutputProcessorServicer_to_server(servicer, listener.server)
        await listener.start()
        async with listening_gateway(listener.address, engine, DEMO_NAME) as gateway:
            yield Line(servicer, listener.address, engine, gateway, demo_tokenizer)
        await listener.server.stop(grace=0)


async def test_tokens_become_text_and_the_plain_end_of_sequence_has_no_name(line: Line) -> None:
    [number] = await line.open(40)
    ids = line.ids("Grüße, 🙂!")
    line.engine.say(EngineFrame(starts=[Start(stream_id=number, cached_tokens=16)]))
    for i, token_id in enumerate(ids):
        line.engine.say_tokens({number: [token_id]}, first=i)
    line.engine.say_tokens(
        {number: [2]}, first=len(ids), finishes=[Finish(stream_id=number, reason=FINISH_REASON_STOP, stop_token_id=2)]
    )
    finish = await line.gateway.finish(40)
    heard = line.gateway.heard[40]
    assert (heard.text, heard.token_ids) == ("Grüße, 🙂!", [*ids, 2])
    assert (finish.reason, finish.num_output_tokens) == (FINISH_REASON_STOP, len(ids) + 1)
    assert finish.WhichOneof("stop_reason") is None
    starts = [start for frame in line.gateway.frames for start in frame.starts]
    assert [(start.stream_id, start.cached_tokens) for start in starts] == [(40, 16)]


async def test_a_stop_string_across_tokens_ends_the_stream_on_both_sides(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(stop=["STOP now"]))
    ids = line.ids("Go on. STOP now please")
    line.engine.say_tokens({number: ids})
    line.engine.say_tokens({number: ids}, first=len(ids))
    finish = await line.gateway.finish(1)
    heard = line.gateway.heard[1]
    assert (heard.text, finish.reason, finish.stop_string) == ("Go on. ", FINISH_REASON_STOP, "STOP now")
    assert line.tokenizer.decode(heard.token_ids) == "Go on. STOP now"
    assert finish.num_output_tokens == len(heard.token_ids)
    await line.engine.hears(lambda: line.engine.cancels == {number: "stop_string"})


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (Sampling(stop=["two"]), "one "),
        (Sampling(stop=["two"], include_stop_str_in_output=True), "one two"),
        (Sampling(stop=["one", "three"], min_tokens=2), "one two "),
    ],
    ids=["cut", "included", "not before min_tokens"],
)
async def test_what_a_stop_string_leaves_of_the_text(line: Line, sampling: Sampling, text: str) -> None:
    [number] = await line.open(1, sampling=sampling)
    for i, token_id in enumerate(line.ids("one two three")):
        line.engine.say_tokens({number: [token_id]}, first=i)
    await line.gateway.finish(1)
    assert line.gateway.heard[1].text == text


async def test_text_that_might_have_been_a_stop_string_comes_with_the_end(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(stop=["two three"]))
    ids = line.ids("one two")
    line.engine.say_tokens({number: ids})
    line.engine.say_finish(number)
    finish = await line.gateway.finish(1)
    assert (line.gateway.heard[1].text, finish.reason) == ("one two", FINISH_REASON_LENGTH)


async def test_a_stop_token_that_was_asked_for_is_named_and_not_spelled(line: Line) -> None:
    ids = line.ids("one two")
    [number] = await line.open(1, sampling=Sampling(stop_token_ids=ids[-1:]))
    line.engine.say_tokens({number: ids})
    line.engine.say_finish(number, FINISH_REASON_STOP, stop_token_id=ids[-1])
    finish = await line.gateway.finish(1)
    assert (line.gateway.heard[1].text, line.gateway.heard[1].token_ids) == ("one", ids)
    assert finish.stop_token_id == ids[-1]


async def test_half_a_character_at_the_end_is_replaced(line: Line) -> None:
    [number] = await line.open(1)
    line.engine.say_tokens({number: line.ids("ok ⚶")[:-1]})
    line.engine.say_finish(number)
    await line.gateway.finish(1)
    assert line.gateway.heard[1].text == "ok \ufffd"


@pytest.mark.parametrize("end", ["⚶", "two"], ids=["half a character", "half a stop string"])
async def test_what_a_broken_stream_held_back_is_left_for_the_next_engine_to_complete(line: Line, end: str) -> None:
    [number] = await line.open(1, sampling=Sampling(stop=["two three"]))
    line.engine.say_tokens({number: line.ids(f"ok {end}")[: -1 if end == "⚶" else None]})
    line.engine.say_finish(number, FINISH_REASON_ERROR, error="the core has ended", retriable=True)
    finish = await line.gateway.finish(1)
    assert (line.gateway.heard[1].text, finish.retriable) == ("ok ", True)


async def test_gateways_share_one_session_with_an_engine_and_keep_their_own_ids(line: Line) -> None:
    async with listening_gateway(line.address, line.engine, DEMO_NAME) as other:
        [mine] = await line.open(1)
        await other.send(other.opening(1))
        theirs = (await line.engine.add(1)).stream_ids[0]
        assert line.engine.num_sessions == 1
        line.engine.say_tokens({theirs: line.ids("theirs"), mine: line.ids("mine")})
        line.engine.say_finish(mine)
        line.engine.say_finish(theirs)
        await line.gateway.finish(1)
        await other.finish(1)
        assert (line.gateway.heard[1].text, other.heard[1].text) == ("mine", "theirs")


async def test_one_frame_of_an_engine_is_one_frame_for_a_gateway(line: Line) -> None:
    numbers = [(await line.open(stream_id))[0] for stream_id in range(1, 65)]
    line.engine.say_tokens({number: line.ids(" hello") for number in numbers})
    frame = await line.gateway.read()
    assert list(frame.stream_ids) == list(range(1, 65))
    assert list(frame.texts) == [" hello"] * 64


async def test_choices_prefill_together_and_end_alone(line: Line) -> None:
    numbers = await line.open(1, 2, 3, choice_indices=[0, 1, 2])
    line.engine.say_tokens({number: line.ids(word) for number, word in zip(numbers, "abc", strict=True)})
    for number in numbers:
        line.engine.say_finish(number)
    for stream_id in (1, 2, 3):
        await line.gateway.finish(stream_id)
    assert [line.gateway.heard[stream_id].text for stream_id in (1, 2, 3)] == ["a", "b", "c"]


async def test_logprobs_carry_text_and_bytes_of_their_tokens(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(logprobs=True, top_logprobs=2))
    ids, half = line.ids("one two"), line.ids("⚶")[0]
    columns = LogprobColumns(
        token_indices=[0, 1],
        logprobs=[-0.5, -1.5],
        num_top=[2, 1],
        top_ids=[ids[0], half, ids[1]],
        top_logprobs=[-0.5, -3.0, -1.0],
    )
    line.engine.say_tokens({number: ids}, logprobs=columns)
    frame = await line.gateway.read()
    [row] = frame.logprobs
    assert [(token.chosen.token, token.chosen.logprob) for token in row.tokens] == [("one", -0.5), (" two", -1.5)]
    top = row.tokens[0].top
    assert [(each.token_id, each.logprob) for each in top] == [(ids[0], -0.5), (half, -3.0)]
    assert top[1].token == "\ufffd"
    assert top[1].token_bytes == "⚶".encode()[: len(top[1].token_bytes)]


async def test_logprobs_end_with_the_token_that_completes_a_stop_string(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(logprobs=True, stop=["two"]))
    ids = line.ids("one two three")
    columns = LogprobColumns(token_indices=range(len(ids)), logprobs=[-1.0] * len(ids), num_top=[0] * len(ids))
    line.engine.say_tokens({number: ids}, logprobs=columns)
    frame = await line.gateway.read()
    assert [token.chosen.token for token in frame.logprobs[0].tokens] == ["one", " two"]


async def test_prompt_logprobs_come_in_parts_and_before_the_end(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(prompt_logprobs=20))
    num_tokens = 1000
    part = PromptLogprobs(
        stream_id=number,
        first_position=1,
        token_ids=[10] * num_tokens,
        logprobs=[-1.0] * num_tokens,
        num_top=20,
        top_ids=[11] * 20 * num_tokens,
        top_logprobs=[-2.0] * 20 * num_tokens,
        last=True,
    )
    line.engine.say(EngineFrame(prompt_logprobs=[part]))
    line.engine.say_finish(number)
    await line.gateway.finish(1)
    parts = [part for frame in line.gateway.frames for part in frame.prompt_logprobs]
    positions = [part.first_position + i for part in parts for i in range(len(part.tokens))]
    assert positions == list(range(1, num_tokens + 1))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1


async def test_credit_passes_on_to_the_engine(line: Line) -> None:
    [number] = await line.open(1, credit=3)
    assert line.engine.adds[0].credit == 3
    await line.gateway.send(credits=[Credit(stream_id=1, tokens=5), Credit(stream_id=99, tokens=5)])
    await line.engine.hears(lambda: [(c.stream_id, c.tokens) for c in line.engine.credits] == [(number, 5)])


async def test_an_engine_that_ignores_credit_loses_the_stream(line: Line) -> None:
    [number] = await line.open(1, credit=1)
    line.engine.say_tokens({number: [10] * 300})
    finish = await line.gateway.finish(1)
    assert (finish.reason, finish.retriable) == (FINISH_REASON_ERROR, True)
    assert "for a credit of 1" in finish.error
    await line.engine.hears(lambda: line.engine.cancels == {number: "fault"})


async def test_a_gap_in_the_tokens_ends_the_stream_instead_of_its_text(line: Line) -> None:
    [number] = await line.open(1)
    line.engine.say_tokens({number: [10]}, first=4)
    finish = await line.gateway.finish(1)
    assert (finish.error, finish.retriable) == ("tokens from 4 on came where 0 was next", True)


async def test_a_cancel_reaches_the_engine_with_its_reason(line: Line) -> None:
    [number] = await line.open(1)
    await line.gateway.send(cancels=[Cancel(stream_id=1, reason="client_gone")])
    await line.engine.hears(lambda: line.engine.cancels == {number: "client_gone"})
    assert (await line.gateway.finish(1)).reason == FINISH_REASON_CANCELLED


async def test_a_request_that_is_cancelled_at_once_never_reaches_the_engine(line: Line) -> None:
    await line.gateway.send(line.gateway.opening(1), cancels=[Cancel(stream_id=1, reason="client_gone")])
    assert (await line.gateway.finish(1)).reason == FINISH_REASON_CANCELLED
    await line.open(2)
    assert len(line.engine.adds) == 1


async def test_one_choice_of_a_request_that_waits_is_cancelled_behind_it(line: Line) -> None:
    await line.gateway.send(line.gateway.opening(1, 2), cancels=[Cancel(stream_id=1, reason="client_gone")])
    first, _ = (await line.engine.add()).stream_ids
    await line.engine.hears(lambda: line.engine.cancels == {first: "client_gone"})


async def test_a_long_prompt_comes_in_parts(line: Line) -> None:
    opening = line.gateway.opening(1, prompt_ids=[1] * 16000, num_prompt_tokens=40000)
    await line.gateway.send(opening)
    await line.gateway.send(parts=[AddPart(stream_id=1, prompt_ids=[2] * 16000)])
    await line.gateway.send(parts=[AddPart(stream_id=1, prompt_ids=[3] * 8000)])
    await line.engine.hears(lambda: len(line.engine.parts) == 2)
    number = line.engine.adds[0].stream_ids[0]
    assert [(part.stream_id, part.prompt_ids[0], len(part.prompt_ids)) for part in line.engine.parts] == [
        (number, 2, 16000),
        (number, 3, 8000),
    ]


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("num_resumed", range(1, 9))
async def test_a_resumed_stream_goes_on_where_the_text_ended(line: Line, num_resumed: int, in_parts: bool) -> None:
    """Half characters and half stop strings included: the joined text is that of an undisturbed stream."""
    sampling, text = Sampling(stop=["END of"]), "a ⚶ END in ⚶"
    ids = line.ids(text)
    assert len(ids) > 8
    [number] = await line.open(1, sampling=sampling)
    line.engine.say_tokens({number: ids[:num_resumed]})
    first = (await line.gateway.read()).texts[0]
    delivered, resumed = [len(first.encode())], ids[:num_resumed]
    if in_parts:
        opening = line.gateway.opening(2, sampling=sampling, num_output_tokens=num_resumed, delivered=delivered)
        await line.gateway.send(opening)
        await line.gateway.send(parts=[AddPart(stream_id=2, output_ids=resumed)])
        number = (await line.engine.add(1)).stream_ids[0]
        # An engine says nothing before it has the whole request.
        await line.engine.hears(lambda: len(line.engine.parts) == 1)
    else:
        output = {"num_output_tokens": num_resumed, "output_ids": resumed}
        [number] = await line.open(2, sampling=sampling, delivered=delivered, **output)
    line.engine.say_tokens({number: ids[num_resumed:]}, first=num_resumed)
    line.engine.say_finish(number)
    finish = await line.gateway.finish(2)
    assert first + line.gateway.heard[2].text == text
    assert finish.num_output_tokens == len(ids)


async def test_text_that_was_made_but_not_delivered_comes_first_after_a_resume(line: Line) -> None:
    ids = line.ids("one two")
    [number] = await line.open(1, num_output_tokens=len(ids), output_ids=ids, delivered=[len("on")])
    line.engine.say_finish(number)
    await line.gateway.finish(1)
    frame = line.gateway.frames[0]
    assert (list(frame.texts), list(frame.text_offset), list(frame.num_tokens)) == (["e two"], [2], [0])


async def test_text_of_any_length_goes_in_frames_below_the_limit(line: Line) -> None:
    ids = line.ids(" hello") * 15000
    await line.gateway.send(line.gateway.opening(1, num_output_tokens=30000, output_ids=ids))
    await line.gateway.send(parts=[AddPart(stream_id=1, output_ids=ids)])
    number = (await line.engine.add()).stream_ids[0]
    await line.engine.hears(lambda: len(line.engine.parts) == 1)
    line.engine.say_finish(number)
    await line.gateway.finish(1)
    assert line.gateway.heard[1].text == " hello" * 30000
    assert max(len(text) for frame in line.gateway.frames for text in frame.texts) == 8192


async def test_a_resume_that_claims_more_text_than_its_tokens_spell_is_refused(line: Line) -> None:
    await line.gateway.send(line.gateway.opening(1, num_output_tokens=1, output_ids=line.ids("one"), delivered=[9]))
    assert "delivered_bytes is 9; allowed: 0…3" in (await line.gateway.finish(1)).error


THINKING_CALLER = AnswerFormat(tool_parser="hermes", tool_names=["time"], reasoning_parser="think")
CALL = '<think>Hm, ä.</think>\nWait. <tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'


async def test_thoughts_and_calls_come_beside_the_content(line: Line) -> None:
    [number] = await line.open(1, answer_format=THINKING_CALLER)
    ids = line.ids(CALL)
    for i, token_id in enumerate(ids):
        line.engine.say_tokens({number: [token_id]}, first=i)
    line.engine.say_finish(number, FINISH_REASON_STOP)
    finish = await line.gateway.finish(1)
    heard = line.gateway.heard[1]
    assert (heard.text, heard.reasoning, heard.num_bytes) == ("Wait.", "Hm, ä.", len(CALL.encode()))
    assert [call.name for call in heard.calls] == ["time"] + [""] * (len(heard.calls) - 1)
    assert heard.calls[0].id.startswith("call_")
    assert "".join(call.arguments for call in heard.calls) == '{"zone": "UTC"}'
    assert len(heard.calls) > 3
    assert finish.reason == FINISH_REASON_TOOL_CALLS
    assert 0 < finish.num_reasoning_tokens < len(ids) // 2


@pytest.mark.parametrize("num_delivered", [0, 3, 12, 30, 60, 80])
async def test_a_resumed_answer_tells_of_the_text_that_was_not_delivered(line: Line, num_delivered: int) -> None:
    ids = line.ids(CALL)
    [number] = await line.open(1, answer_format=THINKING_CALLER, request_id="r")
    if num_delivered:
        line.engine.say_tokens({number: ids[:num_delivered]})
    line.engine.say_finish(number, FINISH_REASON_ERROR)
    await line.gateway.finish(1)
    before = line.gateway.heard[1]
    output = {"num_output_tokens": num_delivered, "output_ids": ids[:num_delivered], "request_id": "r"}
    [number] = await line.open(2, answer_format=THINKING_CALLER, delivered=[before.num_bytes], **output)
    line.engine.say_tokens({number: ids[num_delivered:]}, first=num_delivered)
    line.engine.say_finish(number, FINISH_REASON_STOP)
    await line.gateway.finish(2)
    told = [before, line.gateway.heard[2]]
    assert "".join(each.reasoning for each in told) == "Hm, ä."
    assert "".join(each.text for each in told) == "Wait."
    assert "".join(call.arguments for each in told for call in each.calls) == '{"zone": "UTC"}'
    assert {call.id for each in told for call in each.calls if call.name} == {call_id(THINKING_CALLER, "r", 0, 0)}


async def test_one_call_is_enough_where_calls_are_not_parallel(line: Line) -> None:
    alone = AnswerFormat(tool_parser="hermes", tool_names=["time"], single_call=True)
    [number] = await line.open(1, answer_format=alone)
    line.engine.say_tokens({number: line.ids('<tool_call>{"name": "time"}</tool_call> and on and on')})
    finish = await line.gateway.finish(1)
    assert (finish.reason, line.gateway.heard[1].text) == (FINISH_REASON_TOOL_CALLS, "")
    await line.engine.hears(lambda: number in line.engine.cancels)


@pytest.mark.parametrize("at_once", [3, 7, 60])
async def test_tokens_that_come_at_once_count_as_those_that_come_one_by_one(line: Line, at_once: int) -> None:
    """As the tokens of accepted drafts do, some of them behind the end of the thoughts or of the only call."""
    alone = AnswerFormat(tool_parser="hermes", tool_names=["time"], reasoning_parser="think", single_call=True)
    ids, told = line.ids(CALL + " and on and on"), []
    for stream_id, step in ((1, 1), (2, at_once)):
        [number] = await line.open(stream_id, answer_format=alone)
        for first in range(0, len(ids), step):
            line.engine.say_tokens({number: ids[first : first + step]}, first=first)
        finish = await line.gateway.finish(stream_id)
        heard = line.gateway.heard[stream_id]
        told.append((finish.reason, finish.num_reasoning_tokens, heard.token_ids, heard.text, heard.reasoning))
    assert told[0] == told[1]
    assert 0 < len(told[0][2]) < len(ids)


async def test_long_arguments_go_in_frames_below_the_limit(line: Line) -> None:
    arguments = '{"text": "' + "hello " * 50_000 + '"}'
    [number] = await line.open(1, answer_format=AnswerFormat(tool_parser="hermes", tool_names=["time"]))
    ids = line.ids(f'<tool_call>{{"arguments": {arguments}, "name": "time"}}</tool_call>')
    for start in range(0, len(ids), 200):
        line.engine.say_tokens({number: ids[start : start + 200]}, first=start)
    line.engine.say_finish(number, FINISH_REASON_STOP)
    await line.gateway.finish(1)
    assert "".join(call.arguments for call in line.gateway.heard[1].calls) == arguments


async def test_a_parser_that_nobody_knows_is_refused(line: Line) -> None:
    await line.gateway.send(line.gateway.opening(1, answer_format=AnswerFormat(tool_parser="morse")))
    assert (await line.gateway.finish(1)).error == "the parser 'morse' is not known here"


async def test_an_engine_that_is_gone_ends_its_streams_so_that_they_can_be_retried(line: Line) -> None:
    await line.open(1)
    await line.engine.die()
    finish = await line.gateway.finish(1)
    assert (finish.reason, finish.error, finish.retriable) == (FINISH_REASON_ERROR, "engine e1 is gone", True)


async def test_an_engine_that_says_nothing_when_it_is_asked_loses_its_streams(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "TICK_SECONDS", 0.01)
    [number] = await line.open(1)
    finish = await line.gateway.finish(1)
    assert number in line.engine.asked
    assert (finish.error, finish.retriable, finish.cause) == ("engine e1 is silent", True, LOSS_CAUSE_SILENT)


async def test_an_engine_that_has_nothing_to_say_but_answers_keeps_its_streams(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "TICK_SECONDS", 0.01)
    [number] = await line.open(1)
    for num_questions in range(1, 2 * silence.LOST_TICKS):
        await line.engine.hears(lambda count=num_questions: len(line.engine.asked) >= count)  # type: ignore[misc]
        line.engine.say(EngineFrame(answered=True))
    line.engine.say_finish(number)
    assert (await line.gateway.finish(1)).reason == FINISH_REASON_LENGTH


async def test_an_engine_that_was_never_there_is_gone(line: Line) -> None:
    opening = line.gateway.opening(1)
    opening.engine_address = "127.0.0.1:1"
    await line.gateway.send(opening)
    finish = await line.gateway.finish(1)
    assert (finish.error, finish.retriable) == ("engine e1 is gone", True)


async def test_another_incarnation_than_the_one_meant_refuses(line: Line) -> None:
    await line.gateway.send(line.gateway.opening(1, epoch=8))
    finish = await line.gateway.finish(1)
    assert finish.error.startswith("engine e1 is gone: another one answers at 127.0.0.1:")
    assert finish.retriable
    assert line.engine.adds == []


async def test_streams_of_a_gateway_that_left_are_cancelled_at_their_engine(line: Line) -> None:
    async with listening_gateway(line.address, line.engine, DEMO_NAME) as other:
        await other.send(other.opening(1))
        [number] = (await line.engine.add()).stream_ids
    await line.engine.hears(lambda: line.engine.cancels == {number: "gateway_gone"})


async def test_a_gateway_that_does_not_read_stalls_nobody_else(line: Line) -> None:
    async with listening_gateway(line.address, line.engine, DEMO_NAME) as deaf:
        await deaf.send(deaf.opening(1))
        deaf_number = (await line.engine.add()).stream_ids[0]
        [number] = await line.open(1)
        word = line.ids(" hello") * 250
        for i in range(400):
            line.engine.say_tokens({deaf_number: word}, first=i * 250)
            line.engine.say_tokens({number: word[:1]}, first=i)
        line.engine.say_finish(number)
        await line.gateway.finish(1)
        assert line.gateway.heard[1].text == " hello" * 400
        line.engine.say_finish(deaf_number)
        await deaf.finish(1)
        assert deaf.heard[1].text == " hello" * 250 * 400


async def test_a_model_without_tokenizer_here_is_refused(line: Line) -> None:
    opening = line.gateway.opening(1)
    opening.model = "nobody"
    await line.gateway.send(opening)
    finish = await line.gateway.finish(1)
    assert (finish.error, finish.retriable) == ("the model 'nobody' has no tokenizer here", False)


async def test_a_stream_id_that_is_taken_stays_with_its_stream(line: Line) -> None:
    [number] = await line.open(1)
    await line.gateway.send(line.gateway.opening(1, 2))
    assert (await line.gateway.finish(2)).error == "stream ids are taken"
    line.engine.say_tokens({number: line.ids("still here")})
    line.engine.say_finish(number)
    await line.gateway.finish(1)
    assert line.gateway.heard[1].text == "still here"


async def test_leaving_refuses_new_streams_and_ends_the_session_with_the_last_one(line: Line) -> None:
    [number] = await line.open(1)
    line.servicer.leave()
    await line.gateway.send(line.gateway.opening(2))
    refused = await line.gateway.finish(2)
    assert (refused.error, refused.retriable) == ("the output processor is leaving", True)
    line.engine.say_tokens({number: line.ids("to the end")})
    line.engine.say_finish(number)
    await line.gateway.finish(1)
    assert line.gateway.heard[1].text == "to the end"
    assert await line.gateway.call.read() is grpc.aio.EOF


async def test_streams_that_are_asked_for_are_asked_for_on_the_way_or_end_as_missing(line: Line) -> None:
    [number] = await line.open(1)
    await line.gateway.send(asked=[1, 7])
    finish = await line.gateway.finish(7)
    assert (finish.retriable, finish.cause) == (True, LOSS_CAUSE_MISSING)
    await line.engine.hears(lambda: line.engine.asked == [number])
    line.engine.say_finish(number, FINISH_REASON_ERROR, retriable=True, cause=LOSS_CAUSE_MISSING)
    assert (await line.gateway.finish(1)).cause == LOSS_CAUSE_MISSING


@pytest.mark.parametrize("num_delivered", [6, 20])
async def test_thoughts_of_an_earlier_attempt_still_count(line: Line, num_delivered: int) -> None:
    ids, counts = line.ids(CALL), list[int]()
    for stream_id, num_resumed in ((1, 0), (2, num_delivered)):
        told = len(line.tokenizer.decode(ids[:num_resumed]).encode())
        output = {"num_output_tokens": num_resumed, "output_ids": ids[:num_resumed]}
        [number] = await line.open(stream_id, answer_format=THINKING_CALLER, delivered=[told], **output)
        for i in range(num_resumed, len(ids)):
            line.engine.say_tokens({number: [ids[i]]}, first=i)
        line.engine.say_finish(number, FINISH_REASON_STOP)
        counts.append((await line.gateway.finish(stream_id)).num_reasoning_tokens)
    assert counts[0] == counts[1] > 0
