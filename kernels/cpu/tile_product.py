"""x @ weight.T of packed weights on a CPU, tile after tile of sixteen outputs. `TileProduct` has
activations in 8 bits.

Weights are read once for every eight rows (four in the K formats), from a cache after the first.
One order along K serves every number of rows. Measured on one Zen 4 core: 110 · 10⁹ multiplications
a second for one row, 160 to 175 · 10⁹ from four rows on (Q4_0, Q4_1 and Q8_0, 2026-11-23).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..quant.block_activations import ROW_BYTES
from ..quant.block_formats import BLOCK, BlockFormat
from ..quant.group_tiles import GroupFormat
from .block_activations import quantize, quantize_tokens
from .tile_kernel import kernel_of, num_parts_of

ITEMS_PER_THREAD = 16
PRIVATE = 4096
"""Number of activations up to which every thread rounds all of them for itself."""
_P_ROWS = 5
_P_OUT = 7
_P_X = 12
"""Places of addresses in the memory of a run: arguments 3, 5 and 10 of `_work`."""


class Part(NamedTuple):
    """Outputs of a weight that have one format."""

    format: BlockFormat | GroupFormat
    tiles: torch.Tensor
    """uint8 [tiles, units, bytes]"""
    units: int
    """Number of units in a tile, as its format counts them."""
    num_outputs: int


class TileProduct:
    """x @ weight.T with one weight; the facts of the weight are looked up once."""

    def __init__(
        self, parts: Sequence[Part], num_inputs: int, *, rounds_tokens: bool = False
    ) -> None:
        """The outputs of the parts are concatenated; `rounds_tokens`: the activations of a row
        share one scale."""
        self._quantize = quantize_tokens if rounds_tokens else quantize
        self._num_outputs = sum(part.num_outputs for part in parts)
        self._row_bytes = num_parts_of(rounds_tokens) * (num_inputs // BLOCK) * ROW_BYTES
        self._calls: list[_Call] = []
        at = 0
        for part in parts:
            self._calls.append(
                _Call(part, self._row_bytes, at, self._num_outputs, rounds_tokens=rounds_tokens)
            )
            at += part.num_outputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product of x [T, K], contiguous, as [T, N] in x's dtype."""
        assert x.is_contiguous()
        num_rows = x.shape[0]
        num_threads = torch.get_num_threads()
        is_private = x.numel() <= PRIVATE
        num_bytes = num_threads * num_rows * self._row_bytes
        rows = torch.empty(num_bytes, dtype=torch.uint8) if is_private else self._quantize(x)
        out = x.new_empty(num_rows, self._num_outputs)
        p_rows = rows.data_ptr()
        p_out = out.data_ptr()
        p_x = x.data_ptr() if is_private else 0
        for call in self._calls:
            memory = call.memory(num_rows, num_threads)
            memory[_P_ROWS] = p_rows
            memory[_P_X] = p_x
            memory[_P_OUT] = p_out + call.first_output * x.itemsize
            call.kernel.run(x.dtype, call.num_bytes, memory)
        return out


class _Call:
    """One call that a part's product makes. What only the numbers of rows and threads decide is
    kept from step to step: Python's share of a step of one row is large."""

    def __init__(
        self,
        part: Part,
        row_bytes: int,
        first_output: int,
        row_outputs: int,
        *,
        rounds_tokens: bool,
    ) -> None:
        """`row_bytes`: of activations; `row_outputs`: number of outputs of all parts, from whose
        `first_output` on this part's lie."""
        self.kernel = kernel_of(part.format, rounds_tokens=rounds_tokens)
        self.num_bytes = part.tiles.numel()
        self.first_output = first_output
        self._tiles = part.tiles
        self._units = part.units
        self._num_outputs = part.num_outputs
        self._row_bytes = row_bytes
        self._row_outputs = row_outputs
        self._last: tuple[tuple[int, int], array[int]] | None = None

    def memory(self, num_rows: int, num_threads: int) -> array[int]:
        """Memory for one run of the kernel, without the addresses of rows, outputs and x."""
        last = self._last
        key = (num_rows, num_threads)
        if last is None or last[0] != key:
            last = self._last = key, self._arguments(num_rows, num_threads)
        return last[1][:]

    def _arguments(self, num_rows: int, num_threads: int) -> array[int]:
        tiles = self._tiles
        num_tiles = len(self._tiles)
        tiles_per_item = max(1, num_tiles // (ITEMS_PER_THREAD * num_threads))
        where = tiles.data_ptr(), self._units, tiles.shape[1] * tiles.shape[2]
        rows = (0, self._row_bytes)
        out = (0, self._row_outputs, num_rows, self._num_outputs)
        return array(
            "q", (0, -(-num_tiles // tiles_per_item), *where, *rows, *out, tiles_per_item, 0, 0)
        )
