from __future__ import annotations

import pytest

from headwater.proto.common_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
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
from headwater.services.models.demo_model import DEMO_NAME
from tests.services.output_processor.conftest import Line
from tests.services.output_processor.scripted_engine import (
    listening_gateway,
)


async def test_tokens_become_text_and_the_plain_end_of_sequence_has_no_name(line: Line) -> None:
    [number] = await line.open(40)
    ids = line.ids("Grüße, 🙂!")
    line.engine.send(EngineFrame(starts=[Start(stream_id=number, cached_tokens=16)]))
    for i, token_id in enumerate(ids):
        line.engine.send_tokens({number: [token_id]}, first=i)
    line.engine.send_tokens(
        {number: [2]},
        first=len(ids),
        finishes=[Finish(stream_id=number, reason=FINISH_REASON_STOP, stop_token_id=2)],
    )
    finish = await line.gateway.finish(40)
    received = line.gateway.received[40]
    assert (received.text, received.token_ids) == ("Grüße, 🙂!", [*ids, 2])
    assert (finish.reason, finish.num_output_tokens) == (FINISH_REASON_STOP, len(ids) + 1)
    assert finish.WhichOneof("stop_reason") is None
    starts = [start for frame in line.gateway.frames for start in frame.starts]
    assert [(start.stream_id, start.cached_tokens) for start in starts] == [(40, 16)]


async def test_a_stop_string_across_tokens_ends_the_stream_on_both_sides(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(stop=["STOP now"]))
    ids = line.ids("Go on. STOP now please")
    line.engine.send_tokens({number: ids})
    line.engine.send_tokens({number: ids}, first=len(ids))
    finish = await line.gateway.finish(1)
    received = line.gateway.received[1]
    assert (received.text, finish.reason, finish.stop_string) == (
        "Go on. ",
        FINISH_REASON_STOP,
        "STOP now",
    )
    assert line.tokenizer.decode(received.token_ids) == "Go on. STOP now"
    assert finish.num_output_tokens == len(received.token_ids)
    await line.engine.receives(lambda: line.engine.cancels == {number: "stop_string"})


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (Sampling(stop=["two"]), "one "),
        (Sampling(stop=["two"], include_stop_str_in_output=True), "one two"),
        (Sampling(stop=["one", "three"], min_tokens=2), "one two "),
    ],
    ids=["cut", "included", "not before min_tokens"],
)
async def test_what_a_stop_string_leaves_of_the_text(
    line: Line, sampling: Sampling, text: str
) -> None:
    [number] = await line.open(1, sampling=sampling)
    for i, token_id in enumerate(line.ids("one two three")):
        line.engine.send_tokens({number: [token_id]}, first=i)
    await line.gateway.finish(1)
    assert line.gateway.received[1].text == text


async def test_text_that_might_have_been_a_stop_string_comes_with_the_end(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(stop=["two three"]))
    ids = line.ids("one two")
    line.engine.send_tokens({number: ids})
    line.engine.send_finish(number)
    finish = await line.gateway.finish(1)
    assert (line.gateway.received[1].text, finish.reason) == ("one two", FINISH_REASON_LENGTH)


async def test_a_stop_token_that_was_asked_for_is_named_and_not_spelled(line: Line) -> None:
    ids = line.ids("one two")
    [number] = await line.open(1, sampling=Sampling(stop_token_ids=ids[-1:]))
    line.engine.send_tokens({number: ids})
    line.engine.send_finish(number, FINISH_REASON_STOP, stop_token_id=ids[-1])
    finish = await line.gateway.finish(1)
    assert (line.gateway.received[1].text, line.gateway.received[1].token_ids) == ("one", ids)
    assert finish.stop_token_id == ids[-1]


async def test_half_a_character_at_the_end_is_replaced(line: Line) -> None:
    [number] = await line.open(1)
    line.engine.send_tokens({number: line.ids("ok ⚶")[:-1]})
    line.engine.send_finish(number)
    await line.gateway.finish(1)
    assert line.gateway.received[1].text == "ok \ufffd"


@pytest.mark.parametrize("end", ["⚶", "two"], ids=["half a character", "half a stop string"])
async def test_what_a_broken_stream_held_back_is_left_for_the_next_engine_to_complete(
    line: Line, end: str
) -> None:
    [number] = await line.open(1, sampling=Sampling(stop=["two three"]))
    line.engine.send_tokens({number: line.ids(f"ok {end}")[: -1 if end == "⚶" else None]})
    line.engine.send_finish(number, FINISH_REASON_ERROR, error="the core has ended", retriable=True)
    finish = await line.gateway.finish(1)
    assert (line.gateway.received[1].text, finish.retriable) == ("ok ", True)


async def test_gateways_share_one_session_with_an_engine_and_keep_their_own_ids(line: Line) -> None:
    async with listening_gateway(line.address, line.engine, DEMO_NAME) as other:
        [mine] = await line.open(1)
        await other.send(other.opening(1))
        theirs = (await line.engine.add(1)).stream_ids[0]
        assert line.engine.num_sessions == 1
        line.engine.send_tokens({theirs: line.ids("theirs"), mine: line.ids("mine")})
        line.engine.send_finish(mine)
        line.engine.send_finish(theirs)
        await line.gateway.finish(1)
        await other.finish(1)
        assert (line.gateway.received[1].text, other.received[1].text) == ("mine", "theirs")


async def test_one_frame_of_an_engine_is_one_frame_for_a_gateway(line: Line) -> None:
    numbers = [(await line.open(stream_id))[0] for stream_id in range(1, 65)]
    line.engine.send_tokens({number: line.ids(" hello") for number in numbers})
    frame = await line.gateway.read()
    assert list(frame.stream_ids) == list(range(1, 65))
    assert list(frame.texts) == [" hello"] * 64


async def test_choices_prefill_together_and_end_alone(line: Line) -> None:
    numbers = await line.open(1, 2, 3, choice_indices=[0, 1, 2])
    line.engine.send_tokens(
        {number: line.ids(word) for number, word in zip(numbers, "abc", strict=True)}
    )
    for number in numbers:
        line.engine.send_finish(number)
    for stream_id in (1, 2, 3):
        await line.gateway.finish(stream_id)
    assert [line.gateway.received[stream_id].text for stream_id in (1, 2, 3)] == ["a", "b", "c"]


async def test_logprobs_carry_text_and_bytes_of_their_tokens(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(logprobs=True, top_logprobs=2))
    ids = line.ids("one two")
    half = line.ids("⚶")[0]
    columns = LogprobColumns(
        token_indices=[0, 1],
        logprobs=[-0.5, -1.5],
        num_top=[2, 1],
        top_ids=[ids[0], half, ids[1]],
        top_logprobs=[-0.5, -3.0, -1.0],
    )
    line.engine.send_tokens({number: ids}, logprobs=columns)
    frame = await line.gateway.read()
    [row] = frame.logprobs
    assert [(token.chosen.token, token.chosen.logprob) for token in row.tokens] == [
        ("one", -0.5),
        (" two", -1.5),
    ]
    top = row.tokens[0].top
    assert [(each.token_id, each.logprob) for each in top] == [(ids[0], -0.5), (half, -3.0)]
    assert top[1].token == "\ufffd"
    assert top[1].token_bytes == "⚶".encode()[: len(top[1].token_bytes)]


@pytest.mark.parametrize(
    ("shown", "hidden"),
    [
        ({}, [False, True, False, True]),
        ({"skip_special_tokens": False}, [False, False, False, True]),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            [False, False, False, False],
        ),
    ],
    ids=["skipped", "shown", "shown to the end"],
)
async def test_logprobs_say_which_tokens_are_no_part_of_the_text(
    line: Line, shown: dict[str, bool], hidden: list[bool]
) -> None:
    [number] = await line.open(1, sampling=Sampling(logprobs=True, **shown))
    ids = line.ids("one<|im_start|> two<|im_end|>")
    columns = LogprobColumns(
        token_indices=range(len(ids)), logprobs=[-1.0] * len(ids), num_top=[0] * len(ids)
    )
    line.engine.send_tokens({number: ids}, logprobs=columns)
    frame = await line.gateway.read()
    assert [token.hidden for token in frame.logprobs[0].tokens] == hidden


async def test_logprobs_end_with_the_token_that_completes_a_stop_string(line: Line) -> None:
    [number] = await line.open(1, sampling=Sampling(logprobs=True, stop=["two"]))
    ids = line.ids("one two three")
    columns = LogprobColumns(
        token_indices=range(len(ids)), logprobs=[-1.0] * len(ids), num_top=[0] * len(ids)
    )
    line.engine.send_tokens({number: ids}, logprobs=columns)
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
    line.engine.send(EngineFrame(prompt_logprobs=[part]))
    line.engine.send_finish(number)
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
    await line.engine.receives(
        lambda: [(c.stream_id, c.tokens) for c in line.engine.credits] == [(number, 5)]
    )


async def test_an_engine_that_ignores_credit_loses_the_stream(line: Line) -> None:
    [number] = await line.open(1, credit=1)
    line.engine.send_tokens({number: [10] * 300})
    finish = await line.gateway.finish(1)
    assert (finish.reason, finish.retriable) == (FINISH_REASON_ERROR, True)
    assert "for a credit of 1" in finish.error
    await line.engine.receives(lambda: line.engine.cancels == {number: "fault"})


async def test_a_gap_in_the_tokens_ends_the_stream_instead_of_its_text(line: Line) -> None:
    [number] = await line.open(1)
    line.engine.send_tokens({number: [10]}, first=4)
    finish = await line.gateway.finish(1)
    assert (finish.error, finish.retriable) == ("tokens from 4 on came where 0 was next", True)


async def test_a_cancel_reaches_the_engine_with_its_reason(line: Line) -> None:
    [number] = await line.open(1)
    await line.gateway.send(cancels=[Cancel(stream_id=1, reason="client_gone")])
    await line.engine.receives(lambda: line.engine.cancels == {number: "client_gone"})
    assert (await line.gateway.finish(1)).reason == FINISH_REASON_CANCELLED


async def test_a_request_that_is_cancelled_at_once_never_reaches_the_engine(line: Line) -> None:
    await line.gateway.send(
        line.gateway.opening(1), cancels=[Cancel(stream_id=1, reason="client_gone")]
    )
    assert (await line.gateway.finish(1)).reason == FINISH_REASON_CANCELLED
    await line.open(2)
    assert len(line.engine.adds) == 1


async def test_one_choice_of_a_request_that_waits_is_cancelled_behind_it(line: Line) -> None:
    await line.gateway.send(
        line.gateway.opening(1, 2), cancels=[Cancel(stream_id=1, reason="client_gone")]
    )
    first, _ = (await line.engine.add()).stream_ids
    await line.engine.receives(lambda: line.engine.cancels == {first: "client_gone"})


async def test_a_long_prompt_comes_in_parts(line: Line) -> None:
    opening = line.gateway.opening(1, prompt_ids=[1] * 16000, num_prompt_tokens=40000)
    await line.gateway.send(opening)
    await line.gateway.send(parts=[AddPart(stream_id=1, prompt_ids=[2] * 16000)])
    await line.gateway.send(parts=[AddPart(stream_id=1, prompt_ids=[3] * 8000)])
    await line.engine.receives(lambda: len(line.engine.parts) == 2)
    number = line.engine.adds[0].stream_ids[0]
    assert [
        (part.stream_id, part.prompt_ids[0], len(part.prompt_ids)) for part in line.engine.parts
    ] == [
        (number, 2, 16000),
        (number, 3, 8000),
    ]


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("num_resumed", range(1, 9))
async def test_a_resumed_stream_goes_on_where_the_text_ended(
    line: Line, num_resumed: int, in_parts: bool
) -> None:
    """Half characters and half stop strings included: the joined text is that of an undisturbed
    stream."""
    sampling = Sampling(stop=["END of"])
    text = "a ⚶ END in ⚶"
    ids = line.ids(text)
    assert len(ids) > 8
    [number] = await line.open(1, sampling=sampling)
    line.engine.send_tokens({number: ids[:num_resumed]})
    first = (await line.gateway.read()).texts[0]
    delivered = [len(first.encode())]
    resumed = ids[:num_resumed]
    if in_parts:
        opening = line.gateway.opening(
            2, sampling=sampling, num_output_tokens=num_resumed, delivered=delivered
        )
        await line.gateway.send(opening)
        await line.gateway.send(parts=[AddPart(stream_id=2, output_ids=resumed)])
        number = (await line.engine.add(1)).stream_ids[0]
        # An engine says nothing before it has the whole request.
        await line.engine.receives(lambda: len(line.engine.parts) == 1)
    else:
        output = {"num_output_tokens": num_resumed, "output_ids": resumed}
        [number] = await line.open(2, sampling=sampling, delivered=delivered, **output)
    line.engine.send_tokens({number: ids[num_resumed:]}, first=num_resumed)
    line.engine.send_finish(number)
    finish = await line.gateway.finish(2)
    assert first + line.gateway.received[2].text == text
    assert finish.num_output_tokens == len(ids)


async def test_text_that_was_made_but_not_delivered_comes_first_after_a_resume(line: Line) -> None:
    ids = line.ids("one two")
    [number] = await line.open(1, num_output_tokens=len(ids), output_ids=ids, delivered=[len("on")])
    line.engine.send_finish(number)
    await line.gateway.finish(1)
    frame = line.gateway.frames[0]
    assert (list(frame.texts), list(frame.text_offset), list(frame.num_tokens)) == (
        ["e two"],
        [2],
        [0],
    )


async def test_text_of_any_length_goes_in_frames_below_the_limit(line: Line) -> None:
    ids = line.ids(" hello") * 15000
    await line.gateway.send(line.gateway.opening(1, num_output_tokens=30000, output_ids=ids))
    await line.gateway.send(parts=[AddPart(stream_id=1, output_ids=ids)])
    number = (await line.engine.add()).stream_ids[0]
    await line.engine.receives(lambda: len(line.engine.parts) == 1)
    line.engine.send_finish(number)
    await line.gateway.finish(1)
    assert line.gateway.received[1].text == " hello" * 30000
    assert max(len(text) for frame in line.gateway.frames for text in frame.texts) == 8192


async def test_a_resume_that_claims_more_text_than_its_tokens_spell_is_refused(line: Line) -> None:
    await line.gateway.send(
        line.gateway.opening(1, num_output_tokens=1, output_ids=line.ids("one"), delivered=[9])
    )
    assert "delivered_bytes is 9; allowed: 0…3" in (await line.gateway.finish(1)).error
