from __future__ import annotations

import asyncio

from headwater.proto.engine_pb2 import EngineFrame, Finish, PromptLogprobs
from headwater.services.engine.outbox import Outbox


def token_frame(step: int) -> EngineFrame:
    return EngineFrame(step=step, stream_ids=[1], first_index=[step], num_tokens=[1], token_ids=[step])


def chunk(stream_id: int, first_position: int) -> EngineFrame:
    return EngineFrame(prompt_logprobs=[PromptLogprobs(stream_id=stream_id, first_position=first_position)])


def described(frame: EngineFrame) -> str:
    if frame.prompt_logprobs:
        return f"chunk {frame.prompt_logprobs[0].stream_id}"
    return f"finish {frame.finishes[0].stream_id}" if frame.finishes else f"tokens {frame.step}"


async def test_at_most_one_chunk_goes_between_two_token_frames_and_a_finish_after_its_chunks() -> None:
    outbox = Outbox()
    for first_position in (1, 2, 3):
        outbox.put_chunk(chunk(5, first_position))
    outbox.put([token_frame(1), token_frame(2)])
    assert outbox.holds(Finish(stream_id=5))
    assert not outbox.holds(Finish(stream_id=1))
    outbox.put([token_frame(3), token_frame(4)])
    outbox.close()
    sent = [described(frame) async for frame in outbox.sent()]
    assert sent == [
        "tokens 1", "chunk 5", "tokens 2", "chunk 5", "tokens 3", "chunk 5", "tokens 4", "finish 5",
    ]  # fmt: skip


async def test_a_finish_does_not_wait_for_chunks_that_are_gone() -> None:
    outbox = Outbox()
    outbox.put_chunk(chunk(5, 1))
    sent = outbox.sent()
    assert described(await anext(sent)) == "chunk 5"
    assert not outbox.holds(Finish(stream_id=5))


async def test_who_waits_is_woken_by_what_comes() -> None:
    outbox = Outbox()
    sent = outbox.sent()
    waiting = asyncio.ensure_future(anext(sent))
    await asyncio.sleep(0)
    outbox.put([token_frame(1)])
    assert described(await waiting) == "tokens 1"
    ending = asyncio.ensure_future(anext(sent, None))
    await asyncio.sleep(0)
    outbox.close()
    assert await ending is None
