from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.request import TokenLogprobs
from headwater.engine_core.step_output import StepOutput
from headwater.proto import engine_pb2 as pb
from headwater.services.engine.stage.frames import (
    MAX_ERROR_CHARS,
    MAX_FRAME_BYTES,
    Rows,
    prompt_logprob_frames,
    step_frames,
)

BIG = (1 << 32) - 1


def scored(num_top: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-1.0, top_ids=[BIG] * num_top, top_logprobs=[-2.0] * num_top)


def output_of(counts: list[int], asked: set[int]) -> StepOutput:
    """A row a count: key 100 + i, tokens 1000·i onwards; those of the rows in `asked` have
    logprobs."""
    output = StepOutput(step=7)
    for i, count in enumerate(counts):
        output.keys.append(100 + i)
        output.first_index.append(i)
        output.num_tokens.append(count)
        for j in range(count):
            if i in asked:
                entry = TokenLogprobs(logprob=-float(1000 * i + j), top_ids=[], top_logprobs=[])
                output.logprobs[len(output.token_ids)] = entry
            output.token_ids.append(1000 * i + j)
    return output


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(1, 4), max_size=12), data=st.data())
def test_a_session_gets_its_own_rows_and_their_logprobs(
    counts: list[int], data: st.DataObject
) -> None:
    indices = st.sets(st.integers(0, max(len(counts) - 1, 0)))
    mine = data.draw(indices)
    asked = data.draw(indices)
    rows = Rows.of(output_of(counts, asked), {100 + i: i for i in mine})
    expected = [i for i in range(len(counts)) if i in mine]
    assert rows.stream_ids == rows.first_index == expected
    assert rows.token_ids == [1000 * i + j for i in expected for j in range(counts[i])]
    text = {position: -int(entry.logprob) for position, entry in rows.logprobs.items()}
    assert text == {p: token for p, token in enumerate(rows.token_ids) if token // 1000 in asked}


def test_a_step_is_one_frame() -> None:
    rows = Rows.of(output_of([1] * 256, set()), {100 + i: i for i in range(256)})
    [frame] = step_frames(7, rows, [pb.Start(stream_id=1)], [pb.Finish(stream_id=2)])
    assert (frame.step, len(frame.stream_ids), len(frame.token_ids)) == (7, 256, 256)
    assert (len(frame.starts), len(frame.finishes)) == (1, 1)
    assert frame.ByteSize() < 3000


def test_a_step_that_says_nothing_is_no_frame() -> None:
    assert step_frames(7, Rows(), [], []) == []


def test_a_step_too_large_for_a_frame_is_several_in_order() -> None:
    count = 3000
    rows = Rows(
        [BIG] * count,
        [BIG] * count,
        [1] * count,
        list(range(count)),
        {i: scored(20) for i in range(count)},
    )
    starts = [
        pb.Start(stream_id=BIG, cached_tokens=BIG, queue_seconds=1, prefill_seconds=1)
    ] * count
    finishes = [
        pb.Finish(
            stream_id=BIG,
            stop_token_id=BIG,
            num_output_tokens=BIG,
            error="\N{GRINNING FACE}" * MAX_ERROR_CHARS,
        )
    ] * count
    frames = step_frames(7, rows, starts, finishes)
    assert max(frame.ByteSize() for frame in frames) <= MAX_FRAME_BYTES
    assert [token for frame in frames for token in frame.token_ids] == list(range(count))
    assert sum(len(frame.logprobs.token_indices) for frame in frames) == count
    kinds = [(bool(frame.starts), bool(frame.stream_ids), bool(frame.finishes)) for frame in frames]
    # Starts come before tokens, finishes after them.
    assert kinds == sorted(kinds, key=lambda kind: (kind[2], not kind[0]))
    assert (
        sum(len(frame.starts) for frame in frames)
        == sum(len(frame.finishes) for frame in frames)
        == count
    )


def test_a_prompts_logprobs_are_chunks_of_at_most_a_frame() -> None:
    count = 5000
    frames = list(prompt_logprob_frames(7, BIG, 1, [BIG] * count, [scored(20)] * count, True))
    chunks = [frame.prompt_logprobs[0] for frame in frames]
    assert MAX_FRAME_BYTES * 0.8 < frames[0].ByteSize() <= MAX_FRAME_BYTES
    firsts = [1 + sum(len(chunk.token_ids) for chunk in chunks[:i]) for i in range(len(chunks))]
    assert [chunk.first_position for chunk in chunks] == firsts
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_prompt_of_one_token_has_one_empty_last_chunk() -> None:
    [frame] = prompt_logprob_frames(7, 3, 1, [], [], True)
    assert frame.prompt_logprobs == [pb.PromptLogprobs(stream_id=3, first_position=1, last=True)]
