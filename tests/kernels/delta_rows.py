"""Sequences through a gated delta net's kernel in passes of any sizes, with pages made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from headwater.kernels.delta.delta_arguments import DeltaLayer, HeadPlaces
from headwater.kernels.delta.delta_unit import DeltaUnit
from headwater.kernels.states.state_memory import StateMemory
from tests.kernels.state_steps import FIRST_UNIT, layout_of

Kernel = Callable[..., torch.Tensor]
"""As `kernels.cpu.delta_net.delta_net`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer with random weights."""

    given: DeltaLayer
    dtype: torch.dtype

    @property
    def wide_size(self) -> int:
        unit = self.given.unit
        values = unit.num_values * unit.value_dim
        return self.given.num_heads * 2 * (unit.key_dim + values)

    def inputs(self, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Both projections of a random sequence."""
        device = generator.device
        num_narrow = 2 * self.given.num_heads * self.given.unit.num_values
        return (
            torch.randn(length, self.wide_size, generator=generator, device=device).to(self.dtype),
            torch.randn(length, num_narrow, generator=generator, device=device).to(self.dtype),
        )


def random_layer(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    num_heads: int = 2,
    by_head: bool = False,
    keeps_solved: bool = True,
    **sizes: int,
) -> Layer:
    unit = DeltaUnit(
        **{"num_values": 2, "key_dim": 32, "value_dim": 32, "block_size": 16} | sizes,  # type: ignore[arg-type]
        element_size=dtype.itemsize,
        keeps_solved=keeps_solved,
    )
    device = generator.device
    num_values = num_heads * unit.num_values

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    given = DeltaLayer(
        unit=unit,
        places=HeadPlaces.by_head(unit) if by_head else HeadPlaces.by_kind(num_heads, unit),
        conv=drawn(num_heads, 4, unit.num_channels) / 2,
        rates=drawn(num_values).exp(),
        biases=drawn(num_values) - 2,
        norm=drawn(unit.value_dim),
        eps=1e-6,
    )
    return Layer(given=given, dtype=dtype)


class DeltaRows:
    """Sequences whose states lie in pages of their own for every block, filled with garbage."""

    def __init__(self, layer: Layer, lengths: Sequence[int], kernel: Kernel) -> None:
        self._layer = layer
        self._kernel = kernel
        self._device = layer.given.conv.device
        unit = layer.given.unit
        # Somewhat more bytes from a tail to the next one than it needs.
        num_units = FIRST_UNIT + layer.given.num_heads
        self._layout = layout_of(unit, num_units, unit.tail_bytes + 128)
        self._num_pages = self._layout.num_pages
        num_sets = sum(length // layer.given.unit.block_size + 1 for length in lengths)
        shape = 1 + num_sets * self._num_pages, self._layout.page_bytes
        self.pages = torch.full(shape, 0xFF, dtype=torch.uint8).to(self._device)
        order = torch.randperm(num_sets * self._num_pages) + 1
        sets = iter(order.view(-1, self._num_pages).tolist())
        self._sets = [
            [next(sets) for _ in range(length // layer.given.unit.block_size + 1)]
            for length in lengths
        ]
        self.positions = [0] * len(lengths)

    def run(
        self, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Computes the next counts[i] tokens of row i, of the inputs of its whole sequence."""
        spans = [
            (row, at, at + count)
            for row, (at, count) in enumerate(zip(self.positions, counts, strict=True))
        ]
        self.positions = [end for _, _, end in spans]
        return list(torch.split(self._run(inputs, spans), list(counts)))

    def run_apart(self, inputs: tuple[torch.Tensor, torch.Tensor], count: int) -> torch.Tensor:
        """Computes the next tokens of row 0 in one pass, each as a row of its own."""
        first = self.positions[0]
        return self._run([inputs], [(0, at, at + 1) for at in range(first, first + count)])

    def run_padded(
        self, inputs: tuple[torch.Tensor, torch.Tensor], count: int, num_padding: int
    ) -> torch.Tensor:
        """Computes the first tokens of row 0, with others behind them that are of no row."""
        return self._run([inputs], [(0, 0, count)], num_padding)

    def run_beside_idle_rows(
        self, inputs: tuple[torch.Tensor, torch.Tensor], num_idle: int
    ) -> torch.Tensor:
        """Computes the next token of row 0, before rows that have a token and compute nothing."""
        first = self.positions[0]
        self.positions[0] += 1
        return self._run([inputs], [(0, first, first + 1)], num_idle, are_idle_rows=True)

    def _run(
        self,
        inputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        spans: Sequence[tuple[int, int, int]],
        num_padding: int = 0,
        *,
        are_idle_rows: bool = False,
    ) -> torch.Tensor:
        """Spans: the row of a sequence, its first position, and the position behind the last.
        `are_idle_rows`: whether padding belongs to rows that compute nothing, one token each."""
        block_size = self._layer.given.unit.block_size
        counts = torch.tensor([end - start for _, start, end in spans])
        tokens = (counts.cumsum(0) - counts).tolist()
        idle = num_padding if are_idle_rows else 0
        nowhere = [[0] * self._num_pages] * idle
        memory = StateMemory(
            pages=self.pages,
            first=self._ints(
                [self._sets[row][start // block_size] for row, start, _ in spans] + nowhere
            ),
            last=self._ints(
                [self._sets[row][end // block_size] for row, _, end in spans] + nowhere
            ),
            starts=self._ints([start for _, start, _ in spans] + [0] * idle),
            ends=self._ints([end for _, _, end in spans] + [0] * idle),
            tokens=self._ints([*tokens, *range(len(spans), len(spans) + idle)]),
            layout=self._layout,
            first_unit=FIRST_UNIT,
            has_tokens=are_idle_rows or (not num_padding and int(counts.max()) == 1),
        )
        wide, narrow = (
            torch.cat([inputs[row][kind][start : end + num_padding] for row, start, end in spans])
            for kind in range(2)
        )
        return self._kernel(wide, narrow, self._layer.given, memory)

    def state_of(self, row: int, block: int, head: int) -> torch.Tensor:
        """The state of a key head before a block, [values, key_dim, value_dim]."""
        unit = self._layer.given.unit
        found = []
        for i in range(unit.num_pieces):
            page, first = self._layout.piece((FIRST_UNIT + head) * unit.num_pieces + i)
            stored = self.pages[self._sets[row][block][page]]
            piece = stored[first : first + self._layout.piece_bytes].view(torch.float32)
            found.append(piece.view(unit.key_dim, unit.columns))
        heads = torch.stack(found).unflatten(0, (unit.num_values, -1))
        return heads.transpose(1, 2).flatten(2)

    def _ints(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def in_steps(
    layer: Layer,
    inputs: tuple[torch.Tensor, torch.Tensor],
    borders: Sequence[int],
    kernel: Kernel,
) -> torch.Tensor:
    """The outputs of one sequence in passes that end at the borders, its length last."""
    rows = DeltaRows(layer, [borders[-1]], kernel)
    return torch.cat(
        [rows.run([inputs], [end - start])[0] for start, end in pairwise([0, *borders])]
    )
