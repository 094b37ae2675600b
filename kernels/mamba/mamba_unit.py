"""Layout of a unit of a Mamba-2 layer's state: some heads, at a border of blocks and behind it.

Knows no pages and no tensors: torch is not imported. Source: Dao and Gu, "Transformers are SSMs",
2024."""

from __future__ import annotations

from dataclasses import dataclass

from ..states.set_layout import PIECE_COLUMNS

WIDE_COLUMNS = 16
"""Columns of a piece beside wide keys and values: as many as a CPU computes at once. Small pieces
fill the rest of pages that large tails begin."""
SMALL_COLUMNS = 8
"""Columns of a piece in small pages of a GPU: 32 bytes, as many as memory reads at once. The same
bits as with 64 columns take 4 to 15 % longer for 256 rows of one token, and as long for prompts
(one H200, 2026-11-30)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaUnit:
    """Some heads of a layer at a border of blocks and behind it: the state at the border, in
    `num_pieces` of float32 [state_dim, columns], those of a head one after another; and the tail,
    which grows with the tokens of the block, in this order:

    - inputs of the convolution, elements of the model [width − 1 + block_size, channels], those of
      the tokens before the border first;
    - logarithms of decays: float32 [block_size, heads];
    - keys [block_size, state_dim], and values [block_size, heads · head_dim], times their steps:
      float32, or elements of the model.

    All heads of a unit have the same keys and queries.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    width: int
    """Tokens that the convolution sees, its own included."""
    block_size: int
    element_size: int
    """Bytes of an element of the model."""
    is_wide: bool
    """Whether keys and values are float32, as on a CPU."""
    has_small_pages: bool = False
    """Whether pages are small, as those of ranks and of an fp8 cache."""

    @property
    def values_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: values, a key and a query."""
        return self.values_size + 2 * self.state_dim

    @property
    def state_size(self) -> int:
        """Numbers of the state."""
        return self.values_size * self.state_dim

    @property
    def columns(self) -> int:
        """Columns of a piece: a head whose size they do not divide is one piece."""
        columns = SMALL_COLUMNS if self.has_small_pages else PIECE_COLUMNS
        columns = WIDE_COLUMNS if self.is_wide else columns
        return self.head_dim if self.head_dim % columns else columns

    @property
    def num_pieces(self) -> int:
        return self.num_heads * (self.head_dim // self.columns)

    @property
    def decays_at(self) -> int:
        num_rows = self.width - 1 + self.block_size
        return num_rows * self.num_channels * self.element_size

    @property
    def keys_at(self) -> int:
        return self.decays_at + 4 * self.block_size * self.num_heads

    @property
    def values_at(self) -> int:
        return self.keys_at + self._row_size * self.block_size * self.state_dim

    @property
    def tail_bytes(self) -> int:
        return self.values_at + self._row_size * self.block_size * self.values_size

    @property
    def _row_size(self) -> int:
        """Bytes of a number of keys and values."""
        return 4 if self.is_wide else self.element_size
