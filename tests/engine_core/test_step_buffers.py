from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.device.step_shapes import FEW, NO_TILES, StepShapes
from headwater.engine_core.executors.entry.step_buffers import NUM_UPDATES, StepBuffers

CONFIG = EngineConfig(
    num_blocks=600, max_model_len=4096, max_num_seqs=100, max_num_batched_tokens=4096
)


class Tiles:
    """Tiles of 16 tokens, in place of `AttentionPlans`."""

    def list_tiles(self, counts: Any, starts: Any) -> Any:
        tiles = [
            (i, first) for i, count in enumerate(counts.tolist()) for first in range(0, count, 16)
        ]
        return np.array(tiles, np.int32)

    def max_tiles(self, num_tokens: int, num_chunks: int) -> int:
        return num_tokens // 16 + num_chunks


SHAPES = StepShapes(CONFIG, Tiles())  # type: ignore[arg-type]  # no GPU here
LIKELY = set(SHAPES.likely())


def step(
    *spans: tuple[int, int, int], samples: list[bool] | None = None, step: int = 1
) -> StepPlan:
    """Of (row, start, count)."""
    rows, starts, counts = np.array(spans, np.int32).reshape(-1, 3).T
    nothing = np.empty(0, np.int32)
    return StepPlan(
        step=step,
        released=[],
        admitted=[],
        block_rows=nothing,
        block_indices=nothing,
        block_ids=nothing,
        rows=rows,
        starts=starts,
        counts=counts,
        samples=np.array(samples or [True] * len(rows)),
        output_indices=rows * 10,
        holds=np.zeros(len(rows), np.bool_),
    )


@given(
    num_decodes=st.integers(0, 99),
    lens=st.lists(st.integers(2, 300), min_size=1, max_size=99),
    shares=st.booleans(),
    is_full=st.booleans(),
)
def test_what_recurs_is_prepared_but_small_steps_of_many_prompts(
    num_decodes: int, lens: list[int], shares: bool, is_full: bool
) -> None:
    num_decodes = min(num_decodes, CONFIG.max_num_seqs - len(lens))
    room = CONFIG.max_num_batched_tokens - num_decodes - sum(lens[1:])
    if is_full and room > 1:
        lens = [room, *lens[1:]]
    counts = [1] * num_decodes + lens
    plan = replace(step(*((row, 7, count) for row, count in enumerate(counts))), shares=shares)
    if plan.num_tokens <= CONFIG.max_num_batched_tokens:
        shape, _ = SHAPES.of(plan)
        is_many = len(lens) > FEW and plan.num_tokens < CONFIG.max_num_batched_tokens
        assert shape in LIKELY or is_many or not SHAPES.recurs(shape)


@pytest.mark.parametrize("num_rows", [1, 3, 17, 99, 100])
def test_a_decode_step_is_padded_to_a_size_that_recurs(num_rows: int) -> None:
    shape, tiles = SHAPES.of(step(*((row, 7, 1) for row in range(num_rows))))
    assert shape.is_decode
    assert num_rows <= shape.num_tokens == shape.num_decodes <= max(num_rows * 2, 16)
    assert tiles is NO_TILES
    assert shape in LIKELY


@pytest.mark.parametrize(
    ("spans", "num_tokens", "num_decodes", "num_ends"),
    [
        ([(0, 0, 5)], 32, 0, 0),
        ([(0, 0, 90)], 96, 0, 0),
        ([(0, 0, 300)], 320, 0, 64),
        ([(3, 9, 1), (0, 0, 2000)], 2048, 64, 100),
        ([(row, 9, 1) for row in range(70)] + [(99, 0, 4026)], 4096, 100, 100),
        ([(3, 9, 1), (0, 0, 3000)], 3001, 64, 100),
    ],
)
def test_a_step_with_prompt_tokens_is_padded_where_launches_would_show(
    spans: list[tuple[int, int, int]], num_tokens: int, num_decodes: int, num_ends: int
) -> None:
    shape, tiles = SHAPES.of(step(*spans))
    assert (shape.num_tokens, shape.num_decodes, shape.num_ends) == (
        num_tokens,
        num_decodes,
        num_ends,
    )
    assert shape.num_tiles >= len(tiles)
    assert SHAPES.recurs(shape) == (num_tokens != 3001)


def test_a_step_arrives_whole_and_the_rest_of_its_shape_is_padding() -> None:
    buffers = StepBuffers(CONFIG, SHAPES.max_tiles, torch.device("cpu"), 5)
    plan = step(
        (5, 40, 1),
        (2, 7, 1),
        (9, 100, 20),
        (4, 0, 3),
        (8, 6, 1),
        samples=[True, True, False, True, True],
    )
    shape, tiles = SHAPES.of(plan)
    for number in (1, 2, 3, 4, 5, 6):
        updates = buffers.send(
            step((1, 1, 1), step=number),
            *SHAPES.of(step((1, 1, 1))),
            1,
            np.empty((2, 0), np.int32),
            0,
        )
        assert updates is None
    sent = buffers.send(plan, shape, tiles, 16, np.array([[3, 4, 5], [7, 8, 9]], np.int32), 640)
    assert sent is not None
    assert sent.tolist() == [[3, 4, 5], [7, 8, 9]]
    words = buffers.words(shape)
    assert words.rows.tolist() == [5, 2] + [9] * 20 + [4] * 3 + [8] + [-1] * (shape.num_tokens - 26)
    assert words.positions[:26].tolist() == [40, 7, *range(100, 120), 0, 1, 2, 6]
    assert words.seq_lens.tolist() == [41, 8] + [0] * (shape.num_decodes - 2)
    assert words.table_rows[:2].tolist() == [5, 2]
    assert words.chunk_lens[:3].tolist() == [120, 3, 7]
    assert words.chunk_rows[:3].tolist() == [9, 4, 8]
    assert words.query_starts[:4].tolist() == [2, 22, 25, 26]
    assert words.tiles.view(-1, 2)[: len(tiles)].tolist() == tiles.tolist()
    assert (words.tiles[tiles.size :] == -1).all()
    rows, positions, outputs, at = buffers.draws[:, :5].tolist()
    assert rows == [5, 2, 4, 8, -1]
    assert positions[:4] == [40, 7, 2, 6]
    assert outputs[:4] == [50, 20, 40, 80]
    assert at[:4] == [0, 1, 24, 25]
    assert int(buffers.first_result) == 640


def test_a_prompt_step_returns_only_the_last_tokens_unless_others_are_wanted() -> None:
    buffers = StepBuffers(CONFIG, SHAPES.max_tiles, torch.device("cpu"), 5)
    plan = step((5, 40, 1), (9, 100, 300), (4, 0, 3), (8, 6, 1), samples=[True, False, False, True])
    plan = replace(plan, holds=np.array([False, False, True, False]))
    shape, tiles = SHAPES.of(plan)
    buffers.send(plan, shape, tiles, 4, np.empty((2, 0), np.int32), 0)
    words = buffers.words(shape)
    assert words.end_tokens.tolist() == [0, 300, 303, 304] + [0] * (shape.num_ends - 4)
    assert words.end_lens.tolist() == [41, 0, 3, 7] + [0] * (shape.num_ends - 4)
    assert words.end_rows[:4].tolist() == [5, 9, 4, 8]
    assert buffers.draws[3, :2].tolist() == [0, 3]
    assert shape.last_states(plan).tolist() == [0, 1, 2, 3]
    for rows in ({"prompt_logprob_rows": [4]}, {"pooled_rows": [4]}):
        whole, _ = SHAPES.of(replace(plan, **rows))
        assert whole == replace(shape, num_ends=0)
        assert whole.last_states(plan).tolist() == [0, 300, 303, 304]


def test_more_changes_than_there_is_room_for_travel_by_themselves() -> None:
    buffers = StepBuffers(CONFIG, SHAPES.max_tiles, torch.device("cpu"), 5)
    plan = step((1, 1, 1))
    shape, tiles = SHAPES.of(plan)
    assert buffers.send(plan, shape, tiles, 1, np.zeros((2, NUM_UPDATES), np.int32), 0) is not None
    assert buffers.send(plan, shape, tiles, 1, np.zeros((2, NUM_UPDATES + 1), np.int32), 0) is None
