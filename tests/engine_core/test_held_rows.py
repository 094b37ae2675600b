from __future__ import annotations

import numpy as np

from headwater.engine_core.scheduling.table.masks import HeldRows

MASKS = np.zeros((8, 4, 1), np.int32)


def held_rows() -> HeldRows:
    held = HeldRows(4, MASKS, clock=lambda: 0.0)
    for row in range(4):
        held.seat(row, has_grammar=True)
    return held


def hold(held: HeldRows, row: int, output_index: int, num_drafts: int) -> None:
    """Holds them; their masks are there at once."""
    rows = np.array([row])
    outputs = np.array([output_index], np.int32)
    held.hold(rows, outputs, np.array([num_drafts], np.int32))
    held.note(rows, held.tickets[rows], outputs, num_drafts + 1)


def test_a_row_is_drawn_when_the_masks_of_all_its_drafts_are_there() -> None:
    held = held_rows()
    rows = np.array([2])
    outputs = np.array([5], np.int32)
    # That of the next token may be there before it is known that there are drafts.
    held.note(rows, held.tickets[rows], outputs)
    held.hold(rows, outputs, np.array([3], np.int32))
    assert held.await_masks
    assert held.take_drawable(11)[0].tolist() == []
    held.note(rows, held.tickets[rows], outputs, np.array([4], np.int32))
    assert not held.await_masks
    assert [each.tolist() for each in held.take_drawable(11)] == [[2], [5], [4]]
    assert held.take_drawable(11)[0].tolist() == []


def test_rows_of_several_steps_are_drawn_in_turn_where_they_are_more_than_fit() -> None:
    held = held_rows()
    hold(held, 3, 0, 7)
    hold(held, 1, 0, 7)
    drawn = []
    for turn in range(1, 7):
        hold(held, 0, turn, 2)
        rows, _, num_held = held.take_drawable(11)
        assert num_held.sum() <= 11
        drawn.append(rows.tolist())
        held.num_held[0] = 0
    # Row 0, which comes again and again, keeps neither of the others waiting.
    assert drawn == [[3], [0, 1], [0], [0], [0], [0]]
