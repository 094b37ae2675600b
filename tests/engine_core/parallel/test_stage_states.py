"""Hidden states that the last pipeline stage shows to heads on the first one."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import Int32Array, StepPlan
from headwater.engine_core.executors.stage_guesses import ShownStep
from headwater.engine_core.executors.stage_link import (
    LaterWriter,
    Receiver,
    received_states,
    send_states,
)
from headwater.engine_core.ring import PeerGone, RingReader, RingWriter, create_ring
from headwater.engine_core.stage_drafts import ALL, SAMPLED, StageDrafts

HIDDEN = 4


def column(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def step() -> StepPlan:
    """A prompt chunk of three tokens, a row of one token and two drafts, and a row of one token."""
    nothing = column()
    return StepPlan(
        step=0,
        released=[],
        admitted=[],
        block_rows=nothing,
        block_indices=nothing,
        block_ids=nothing,
        rows=column(5, 2, 7),
        starts=column(0, 10, 20),
        counts=column(3, 3, 1),
        samples=np.array([False, True, True]),
        output_indices=column(0, 1, 2),
        holds=np.zeros(3, np.bool_),
        num_drafts=column(0, 2, 0),
    )


def states(num_tokens: int, first: int) -> torch.Tensor:
    return (torch.arange(num_tokens) + first)[:, None].expand(-1, HIDDEN).float().contiguous()


@pytest.mark.parametrize(
    ("final", "num_final", "kept"),
    [(SAMPLED, 4, [103]), (ALL, 7, [100, 101, 102, 106]), ("", 0, [])],
)
def test_a_guesser_sees_states_of_rows_that_have_not_left(
    final: str, num_final: int, kept: list[int]
) -> None:
    drafts = StageDrafts(final=final, layers=(1, 4, 6))
    message = torch.cat([states(num_final, 100), states(7, 400), states(7, 600)])
    shown = ShownStep(step(), {1: states(7, 0)})
    seen = shown.computed(drafts, message, np.array([True, False, True]))
    assert (seen.rows.tolist(), seen.starts.tolist(), seen.counts.tolist()) == (
        [5, 7],
        [0, 20],
        [3, 1],
    )
    assert (seen.num_drafts.tolist(), seen.num_sampled.tolist()) == ([0, 0], [0, 1])
    assert seen.final[:, 0].tolist() == kept
    assert {layer: each[:, 0].tolist() for layer, each in seen.inputs.items()} == {
        1: [0, 1, 2, 6],
        4: [400, 401, 402, 406],
        6: [600, 601, 602, 606],
    }
    whole = shown.computed(drafts, message, np.ones(3, np.bool_))
    assert whole.final[:, 0].tolist() == list(range(100, 100 + num_final))
    assert whole.num_drafts.tolist() == [0, 2, 0]


def test_facts_of_what_drafts_are_the_same_on_another_host() -> None:
    for drafts in (
        StageDrafts(),
        StageDrafts(most=3, final=SAMPLED),
        StageDrafts(layers=(1, 2, 5)),
    ):
        assert StageDrafts.from_json(drafts.to_json()) == drafts


def test_messages_that_a_ring_has_no_room_for_hold_up_nobody_and_come_in_order() -> None:
    writing, reading = create_ring(1 << 12)
    writer, receiver = (
        LaterWriter(RingWriter(writing)),
        Receiver(RingReader(reading), lambda waits: None),
    )
    sent = [states(n, n) for n in (3000, 0, 1, 500)]
    for each in sent:
        send_states(writer, each)
    for each in sent:
        assert torch.equal(received_states(receiver, HIDDEN, torch.float32), each)


def test_a_writer_learns_that_the_other_stage_is_gone() -> None:
    writing, reading = create_ring(1 << 12)
    writer = LaterWriter(RingWriter(writing))
    RingReader(reading).close()
    writer.write(bytes(1 << 13))
    # It learns so in its thread.
    end = time.monotonic() + 60
    while not writer.is_gone and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(PeerGone):
        writer.write(b"")
