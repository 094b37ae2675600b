from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import DrawPlan
from headwater.engine_core.executors.exit.draw_buffers import DrawBuffers
from headwater.engine_core.executors.table.by_position import draw_by_position
from headwater.engine_core.ragged import places, run_lengths

VOCAB_SIZE = 96
CONFIG = EngineConfig(num_blocks=600, max_model_len=4096, max_num_seqs=40, max_draft_tokens=7)


def plan(num_drafts: dict[int, int], masks: np.ndarray) -> DrawPlan:
    rows = np.array(sorted(num_drafts), np.int32)
    drafts = np.array([num_drafts[row] for row in rows.tolist()], np.int32)
    return DrawPlan(
        step=3,
        rows=rows,
        positions=rows * 10,
        output_indices=rows + 5,
        masks=masks,
        num_drafts=drafts if drafts.any() else None,
    )


@pytest.mark.parametrize(
    "num_drafts",
    [
        {4: 0},
        {4: 7},
        {0: 0, 39: 0},
        {0: 7, 39: 3},
        dict.fromkeys(range(40), 0),
        {row: 7 if row % 20 == 0 else 0 for row in range(0, 40, 2)},
        {3: 1, 4: 0, 5: 4, 20: 2, 38: 4},
    ],
    ids=str,
)
def test_every_position_of_a_draw_comes_with_its_own_mask_and_state(
    num_drafts: dict[int, int],
) -> None:
    table = np.arange(8 * 40 * 3, dtype=np.int32).reshape(8, 40, 3)
    buffers = DrawBuffers(CONFIG, VOCAB_SIZE, torch.device("cpu"))
    buffers.send(3, draw_by_position(plan(num_drafts, table)), table, CONFIG.max_positions, 77)
    drawn = [
        (row, place) for row, count in sorted(num_drafts.items()) for place in range(count + 1)
    ]
    rows, positions, outputs = (each.tolist() for each in buffers.draws(CONFIG.max_positions))
    masks, held = buffers.masks(CONFIG.max_positions)
    assert rows[: len(drawn)] == [row for row, _ in drawn]
    assert positions[: len(drawn)] == [10 * row + place - 1 for row, place in drawn]
    assert outputs[: len(drawn)] == [row + 5 + place for row, place in drawn]
    assert masks[: len(drawn)].tolist() == [table[place, row].tolist() for row, place in drawn]
    assert set(rows[len(drawn) :]) <= {-1}
    # The states of one place lie as rows do, and none lies where another does.
    assert held[: len(drawn)].tolist() == [place * 40 + row for row, place in drawn]
    assert buffers.first_result.tolist() == [77]
    buffers.close()


def test_rows_that_stand_side_by_side_are_places_of_one() -> None:
    rows = np.array([7, 7, 7, 2, 5, 5, 0], np.int32)
    assert run_lengths(rows).tolist() == [3, 1, 2, 1]
    assert places(run_lengths(rows)).tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert run_lengths(rows[:0]).tolist() == []
