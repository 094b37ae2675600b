"""Layout of a unit of a gated delta net's state: one key head with its value heads, at a border of
blocks and behind it.

Knows no pages and no tensors: torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..states.set_layout import PIECE_COLUMNS

CONV_WIDTH = 4
"""Tokens that the causal convolution sees, its own included."""
NUM_BEFORE = CONV_WIDTH - 1
"""Tokens before a border whose inputs the tail begins with."""
SOLVED_COLUMNS = 32
"""Columns of a piece in small pages beside solved rows: as many as a CPU computes at once. Such
pieces fill more of a page, and take a tenth longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaUnit:
    """The state at the border, in `num_pieces` of float32 [key_dim, columns], those of a value head
    one after another; and bytes of the tail, which grows with the tokens of the block, in this
    order:

    - inputs of the convolution, elements of the model [NUM_BEFORE + block_size, channels], those of
      the tokens before the border first;
    - gates: float32 [block_size, values, 2], the logarithm of the decay and the update's share;
    - keys as they are multiplied [block_size, key_dim], and values [values, block_size, value_dim]:
      solved ones in float32, or corrected ones in elements of the model (see `inverse_rows`);
    - with corrected values, rows of the inverse: float32 [values, block_size, block_size].
    """

    num_values: int
    """Value heads of the key head."""
    key_dim: int
    value_dim: int
    block_size: int
    """Tokens between borders."""
    element_size: int
    """Bytes of an element of the model."""
    keeps_solved: bool
    """Whether the tail's values are solved, so that a token is computed without its block."""
    has_small_pages: bool = False
    """Whether pages are small, as those of ranks and of an fp8 cache."""

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: a query, a key and the values."""
        return 2 * self.key_dim + self.num_values * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of the state."""
        return self.num_values * self.key_dim * self.value_dim

    @property
    def columns(self) -> int:
        """Columns of a piece."""
        is_small = self.has_small_pages and self.keeps_solved
        return min(self.value_dim, SOLVED_COLUMNS if is_small else PIECE_COLUMNS)

    @property
    def num_pieces(self) -> int:
        return self.num_values * (self.value_dim // self.columns)

    @property
    def gates_at(self) -> int:
        rows = NUM_BEFORE + self.block_size
        return rows * self.num_channels * self.element_size

    @property
    def keys_at(self) -> int:
        return self.gates_at + 8 * self.block_size * self.num_values

    @property
    def values_at(self) -> int:
        return self.keys_at + self._row_size * self.block_size * self.key_dim

    @property
    def rows_at(self) -> int:
        values = self.num_values * self.block_size * self.value_dim
        return self.values_at + self._row_size * values

    @property
    def tail_bytes(self) -> int:
        rows = 0 if self.keeps_solved else self.num_values * self.block_size**2
        return self.rows_at + 4 * rows

    @property
    def _row_size(self) -> int:
        """Bytes of a number of keys and values."""
        return 4 if self.keeps_solved else self.element_size
