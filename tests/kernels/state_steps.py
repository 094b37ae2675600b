"""Sequences through a kernel of state layers in passes of any sizes, with pages made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from headwater.kernels.states.set_layout import ALIGNMENT, SetLayout, SetSizes
from headwater.kernels.states.state_memory import StateMemory

BLOCK = 16
LENGTH = 50
"""Three borders, and two tokens."""
BORDERS = [
    [*range(1, LENGTH + 1)],
    [1, LENGTH],
    [15, LENGTH],
    [16, LENGTH],
    [17, LENGTH],
    [2, 18, 34, LENGTH],
    [*range(7, LENGTH, 7), LENGTH],
    [32, 33, 48, LENGTH],
]
"""Ends of passes."""
FIRST_UNIT = 1


def layout_of(unit: Any, num_units: int, tail_bytes: int) -> SetLayout:
    """A layout of units whose pages have room for two tails with a piece behind them; pieces of
    most states lie in pages of their own."""
    num_pieces = getattr(unit, "num_pieces", 0)
    piece_bytes = 4 * unit.state_size // num_pieces if num_pieces else 0
    tail_bytes = -(-tail_bytes // ALIGNMENT) * ALIGNMENT
    sizes = SetSizes(num_units, tail_bytes, num_units * num_pieces, piece_bytes)
    page_bytes = 2 * tail_bytes + max(piece_bytes, ALIGNMENT)
    return SetLayout(
        page_bytes=page_bytes,
        num_pages=SetLayout.of(sizes, page_bytes).num_pages + num_units,
        tail_bytes=tail_bytes,
        tails_per_page=2,
        num_tail_pages=-(-num_units // 2),
        piece_bytes=piece_bytes,
        pieces_behind=1 if num_pieces else 0,
    )


class StatePages:
    """Sequences of at most `LENGTH` tokens, each with a state set for every block. Pages hold
    garbage before they are written."""

    def __init__(
        self,
        kernel: Callable[..., torch.Tensor],
        layer: Any,
        inputs: Sequence[torch.Tensor],
        num_bytes: int,
    ) -> None:
        """inputs [T, …] of whole sequences; `num_bytes` of a unit's tail."""
        self._kernel = kernel
        self._layer = layer
        self.inputs = inputs
        self._device = inputs[0].device
        self._layout = layout_of(layer.unit, FIRST_UNIT + layer.num_units, num_bytes)
        self._num_pages = self._layout.num_pages
        self._num_sets = LENGTH // BLOCK + 1
        num_pages = (len(inputs) * self._num_sets + 1) * self._num_pages
        shape = num_pages, self._layout.page_bytes
        self._pages = torch.full(shape, 255, dtype=torch.uint8).to(self._device)

    def run(
        self, spans: Sequence[tuple[int, int, int]], *, num_padding: int = 0, num_idle: int = 0
    ) -> torch.Tensor:
        """Computes spans (sequence, first position, position behind the last) in one pass: first
        all of them, then tokens of no row, or rows of a token each that compute nothing."""
        counts = [end - start for _, start, end in spans]
        idle = [(0, 0, 0)] * num_idle
        rows = [*spans, *idle]
        num_tokens = sum(counts)
        firsts = [sum(counts[:row]) for row in range(len(spans))]
        memory = StateMemory(
            pages=self._pages,
            first=self._pages_of([(row, start) for row, start, _ in rows]),
            last=self._pages_of([(row, end) for row, _, end in rows]),
            starts=self._ints([start for _, start, _ in rows]),
            ends=self._ints([end for _, _, end in rows]),
            tokens=self._ints([*firsts, *range(num_tokens, num_tokens + num_idle)]),
            layout=self._layout,
            first_unit=FIRST_UNIT,
            has_tokens=num_idle > 0,
        )
        parts = [self.inputs[row][start:end] for row, start, end in spans]
        parts.append(self.inputs[0][: num_padding + num_idle])
        return self._kernel(torch.cat(parts), self._layer, memory)

    def _pages_of(self, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        sets = [1 + row * self._num_sets + position // BLOCK for row, position in places]
        return self._ints(
            [[each * self._num_pages + i for i in range(self._num_pages)] for each in sets]
        )

    def _ints(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def in_steps(
    kernel: Callable[..., torch.Tensor],
    layer: Any,
    inputs: Sequence[torch.Tensor],
    borders: Sequence[int],
    num_bytes: int,
) -> torch.Tensor:
    """Outputs of all sequences, one after another, of passes that end at the borders, or with a
    shorter sequence. `num_bytes` of a unit's tail."""
    pages = StatePages(kernel, layer, inputs, num_bytes)
    outputs: list[list[torch.Tensor]] = [[] for _ in inputs]
    for begin, end in pairwise([0, *borders]):
        spans = [
            (row, min(begin, len(each)), min(end, len(each))) for row, each in enumerate(inputs)
        ]
        lengths = [stop - start for _, start, stop in spans]
        for own, made in zip(outputs, pages.run(spans).split(lengths), strict=True):
            own.append(made)
    return torch.cat([torch.cat(own) for own in outputs])


def check_neighbours(
    kernel: Callable[..., torch.Tensor],
    with_neighbours: Callable[..., torch.Tensor],
    layer: Any,
    inputs: torch.Tensor,
    num_bytes: int,
    start: int,
) -> None:
    """Four rows of one token follow one another from a position on, and have the bits of a pass."""
    length = len(inputs)
    pages = StatePages(with_neighbours, layer, [inputs], num_bytes)
    first = pages.run([(0, 0, start)])
    apart = pages.run([(0, at, at + 1) for at in range(start, start + 4)])
    rest = pages.run([(0, start + 4, length)])
    whole = in_steps(kernel, layer, [inputs], [length], num_bytes)
    assert torch.equal(torch.cat((first, apart, rest)), whole)


def check_padding(
    kernel: Callable[..., torch.Tensor],
    layer: Any,
    inputs: torch.Tensor,
    num_bytes: int,
) -> None:
    """Tokens of no row, and of rows that compute nothing, come out as zeros: what is drawn of
    padding is the token of the padding of a next step."""
    length = len(inputs)
    whole = in_steps(kernel, layer, [inputs], [length], num_bytes)
    pages = StatePages(kernel, layer, [inputs], num_bytes)
    out = pages.run([(0, 0, 15)], num_padding=2)
    assert torch.equal(out[:15], whole[:15])
    assert not out[15:].any()
    for position in (15, 16):
        out = pages.run([(0, position, position + 1)], num_idle=3)
        assert torch.equal(out[0], whole[position])
        assert not out[1:].any()


def fill_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels do not write of their outputs is no number."""
    new_empty = torch.Tensor.new_empty

    def of_nan(own: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made = new_empty(own, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", of_nan)
