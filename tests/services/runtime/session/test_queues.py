"""What waits at one end of a session: cancels, credit, probes, chunks of long things, messages that
share a frame."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.proto.engine_pb2 import AddPart, Cancel, ClientFrame
from headwater.services.runtime.session.attempt_fence import AttemptFence
from headwater.services.runtime.session.chunk_lane import ChunkLane
from headwater.services.runtime.session.controls import MAX_ITEMS, Controls
from headwater.services.runtime.session.joined import num_joined


def frames_of(controls: Controls) -> list[ClientFrame]:
    frames = []
    while controls:
        controls.put_into(frame := ClientFrame())
        frames.append(frame)
    return frames


def test_credits_of_a_stream_become_one_and_none_outlives_its_stream() -> None:
    controls = Controls()
    for stream_id, tokens in ((1, 5), (2, 7), (1, 3)):
        controls.grant(stream_id, tokens)
    controls.probe(2)
    controls.cancel(Cancel(stream_id=2, reason="done"))
    (frame,) = frames_of(controls)
    assert [(each.stream_id, each.tokens) for each in frame.credits] == [(1, 8)]
    assert [each.stream_id for each in frame.cancels] == [2]
    assert not frame.probed


@given(st.integers(0, 3 * MAX_ITEMS), st.integers(0, 3 * MAX_ITEMS))
def test_no_frame_has_more_than_it_may_and_nothing_is_left_behind(
    num_cancels: int, num_credits: int
) -> None:
    controls = Controls()
    for stream_id in range(num_credits):
        controls.grant(stream_id, 1)
        controls.probe(stream_id)
    for stream_id in range(num_credits, num_credits + num_cancels):
        controls.cancel(Cancel(stream_id=stream_id))
    frames = frames_of(controls)
    assert all(
        max(len(each.cancels), len(each.credits), len(each.probed)) <= MAX_ITEMS for each in frames
    )
    assert sum(len(each.cancels) for each in frames) == num_cancels
    assert [each.stream_id for frame in frames for each in frame.credits] == list(
        range(num_credits)
    )
    assert [each for frame in frames for each in frame.probed] == list(range(num_credits))


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 120))
def test_messages_that_share_a_frame_are_as_many_as_fit_and_at_least_one(
    sizes: list[int], most_bytes: int
) -> None:
    messages = [AddPart(grammar=b"x" * size) for size in sizes]
    count = num_joined(messages, most_bytes)
    joined = sum(message.ByteSize() for message in messages[:count])
    assert count >= min(1, len(messages))
    assert count <= 1 or joined <= most_bytes
    if count < len(messages):
        assert joined + messages[count].ByteSize() > most_bytes


@given(st.lists(st.sampled_from(["frame", "chunk 1", "chunk 2", "finish 1", "send"]), max_size=40))
def test_chunks_keep_their_order_give_way_to_frames_and_take_their_finish_along(
    acts: list[str],
) -> None:
    lane: ChunkLane[int, str] = ChunkLane()
    frames = 0
    sent = []
    put = 0
    finished = False
    for act in [*acts, *["send"] * 100]:
        if act == "frame":
            frames += 1
        elif act == "finish 1":
            finished |= lane.holds(1, "end of 1")
        elif act.startswith("chunk") and not (finished and act == "chunk 1"):
            lane.put(int(act[-1]), put)
            put += 1
        elif act == "send":
            waiting = frames > 0
            if lane.is_next(waiting):
                chunk, finish = lane.take()
                sent.append(("chunk", chunk))
                if finish is not None:
                    sent.append(("finish", 0))
            elif waiting:
                frames -= 1
                sent.append(("frame", 0))
    assert not lane
    assert [number for kind, number in sent if kind == "chunk"] == list(range(put))
    assert [kind for kind, _ in sent].count("finish") == finished


def test_a_chunk_does_not_go_twice_while_frames_wait() -> None:
    lane: ChunkLane[int, str] = ChunkLane()
    for number in range(3):
        lane.put(1, number)
    turns = []
    for _ in range(4):
        turns.append(lane.is_next(others_wait=True))
        if turns[-1]:
            lane.take()
    assert turns == [False, True, False, True]


def test_a_later_attempt_ends_an_earlier_one_and_refuses_it_from_then_on() -> None:
    fence = AttemptFence()
    ended = []
    fence.enter(("r", 0), 1, 10, lambda: ended.append(10))
    fence.enter(("r", 0), 1, 11, lambda: ended.append(11))
    fence.enter(("r", 1), 1, 12, lambda: ended.append(12))
    assert not fence.is_stale(("r", 0), 1)
    fence.enter(("r", 0), 2, 13, lambda: ended.append(13))
    assert ended == [10, 11]
    assert fence.is_stale(("r", 0), 1)
    assert not fence.is_stale(("r", 1), 1)
    fence.leave(("r", 0), 13)
    assert not fence.is_stale(("r", 0), 1)
