from __future__ import annotations

from headwater.proto.engine_pb2 import EngineFrame, Finish, PromptLogprobs
from headwater.services.engine.stage.outbox import Outbox


def token_frame(step: int) -> EngineFrame:
    return EngineFrame(
        step=step, stream_ids=[1], first_index=[step], num_tokens=[1], token_ids=[step]
    )


def chunk(stream_id: int, first_position: int) -> EngineFrame:
    return EngineFrame(
        prompt_logprobs=[PromptLogprobs(stream_id=stream_id, first_position=first_position)]
    )


def described(frame: EngineFrame) -> str:
    if frame.prompt_logprobs:
        return f"chunk {frame.prompt_logprobs[0].stream_id}"
    return f"finish {frame.finishes[0].stream_id}" if frame.finishes else f"tokens {frame.step}"


def test_at_most_one_chunk_goes_between_two_token_frames_and_a_finish_after_its_chunks() -> None:
    outbox = Outbox()
    for first_position in (1, 2, 3):
        outbox.put_chunk(chunk(5, first_position))
    outbox.put([token_frame(1), token_frame(2)])
    assert outbox.holds(Finish(stream_id=5))
    assert not outbox.holds(Finish(stream_id=1))
    outbox.put([token_frame(3), token_frame(4)])
    sent = [described(frame) for frame in iter(outbox.next_frame, None)]
    assert sent == [
        "tokens 1", "chunk 5", "tokens 2", "chunk 5", "tokens 3", "chunk 5", "tokens 4", "finish 5",
    ]  # fmt: skip


def test_a_finish_does_not_wait_for_chunks_that_are_gone() -> None:
    outbox = Outbox()
    outbox.put_chunk(chunk(5, 1))
    frame = outbox.next_frame()
    assert frame is not None
    assert described(frame) == "chunk 5"
    assert not outbox.holds(Finish(stream_id=5))
    assert outbox.next_frame() is None


def test_the_session_gets_every_frame() -> None:
    outbox = Outbox()
    reported = []
    outbox.on_filled = lambda: reported.append(True)
    outbox.put([token_frame(1)])
    outbox.put_chunk(chunk(5, 1))
    assert len(reported) == 2
