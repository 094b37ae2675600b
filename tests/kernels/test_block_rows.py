"""Spans of rows among the programs of kernels of state layers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import triton
import triton.language as tl

from headwater.kernels.delta import inverse_rows, mix_inputs
from headwater.kernels.states.block_rows import span_of
from headwater.kernels.states.state_memory import StateMemory
from tests.kernels.delta_rows import random_layer
from tests.kernels.state_steps import layout_of

SIZE = 64


@triton.jit
def _spans(p_starts, p_ends, num_rows, p_out, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    i = tl.program_id(0)
    row, number, _ = span_of(p_starts, p_ends, num_rows, SIZE, ALIGNED, True)
    tl.store(p_out + 2 * i, row)
    tl.store(p_out + 2 * i + 1, number)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("num_padding", [0, 3, 300])
def test_programs_find_the_spans_of_rows(
    num_padding: int, aligned: bool, device: torch.device
) -> None:
    rows = [(0, 200), (0, 0), (63, 65), (64, 128), (130, 131), (7, 7), (0, 64), (5, 64), (40, 300)]
    rows[3:3] = [(0, 0)] * num_padding
    starts, ends = (
        torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*rows, strict=True)
    )
    expected = []
    for row, (start, end) in enumerate(rows):
        origin = start // SIZE * SIZE if aligned else start
        count = -(-(end - origin) // SIZE) if end > start else 0
        expected += [(row, number) for number in range(count)]
    out = starts.new_empty(len(expected) + 2, 2)
    _spans[(len(out),)](starts, ends, len(rows), out, SIZE=SIZE, ALIGNED=aligned)
    found = [tuple(each) for each in out.tolist()]
    assert found[: len(expected)] == expected
    assert not set(found[len(expected) :]) & set(expected)
    assert {row for row, _ in found[len(expected) :]} == {len(rows) - 1}


class _Launches:
    """Stands in for a kernel: counts the programs that it is launched with."""

    def __init__(self) -> None:
        self.num_programs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.num_programs += prod(grid)
        return lambda *args, **constants: None


def test_room_for_rows_that_a_step_does_not_have_starts_few_programs(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 programs for each of 64 rows took 0.4 ms of a launch of one row on an H200."""
    num_tokens, room = 1024, 64
    layer = random_layer(generator, torch.bfloat16, keeps_solved=False, num_heads=1, num_values=1)
    wide, narrow = layer.inputs(num_tokens, generator)
    rows = torch.zeros(room, 1, dtype=torch.int32, device=generator.device)
    memory = StateMemory(
        pages=rows, first=rows, last=rows, starts=rows[:, 0], ends=rows[:, 0], tokens=rows[:, 0],
        layout=layout_of(layer.given.unit, 1, 1), first_unit=0,
    )  # fmt: skip
    launches = _Launches()
    monkeypatch.setattr(mix_inputs, "_mix_inputs", launches)
    mixed = mix_inputs.mix_inputs(wide, narrow, layer.given, memory)
    parts = 3
    assert launches.num_programs <= parts * (room + num_tokens // 64)

    launches = _Launches()
    monkeypatch.setattr(inverse_rows, "_inverse_rows", launches)
    inverse_rows.inverse_rows(mixed, layer.given, memory)
    assert launches.num_programs <= 2 * room + num_tokens // layer.given.unit.block_size
