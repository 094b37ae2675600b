"""KV blocks that drafts begin, in a model whose pages may have held states."""

from __future__ import annotations

from typing import Protocol

import torch

from headwater.kernels.blocks.clear_begun import clear_begun

from ...table_columns import TableColumns
from ..device.step_shapes import StepShape
from ..entry.step_buffers import StepBuffers
from ..table.device_table import DeviceTable


def words_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """int32 [num_blocks, words]: view of a KV cache [1, 2, num_blocks, Hk, block_size, D] by block,
    if each block is contiguous."""
    _, _, num_blocks, num_heads, block_size, head_dim = kv_cache.shape
    size = 2 * num_heads * block_size * head_dim
    shape = (num_blocks, size), (kv_cache.stride(2), 1), kv_cache.storage_offset()
    return kv_cache.as_strided(*shape).view(torch.int32)


class BegunBlocks(Protocol):
    """KV blocks that the drafts of a step begin."""

    def clear(self, shape: StepShape) -> None:
        """Clears the blocks, which drafts after the first one read."""


class AnyBlocks:
    """See `BegunBlocks`, for pages that never held anything but keys and values, so that all
    numbers are finite."""

    def clear(self, shape: StepShape) -> None:
        pass


class ClearedBlocks:
    """See `BegunBlocks`: what states have left in a page may be no number in the dtype of keys and
    values."""

    def __init__(
        self,
        words: torch.Tensor,
        buffers: StepBuffers,
        table: DeviceTable,
        columns: TableColumns,
        block_size: int,
    ) -> None:
        """`words`: see `words_of`. `buffers`: of the
        steps that draft."""
        self._words = words
        self._buffers = buffers
        self._table = table
        self._max_blocks = columns.max_blocks
        self._block_size = block_size

    def clear(self, shape: StepShape) -> None:
        step = self._buffers.words(shape)
        num_drafts = self._buffers.draws[3, : shape.num_tokens]
        ends = torch.where(step.seq_lens > 0, step.seq_lens + num_drafts, 0)
        clear_begun(
            self._words,
            step.table_rows,
            step.seq_lens - 1,
            ends,
            self._table.kv_pages,
            self._max_blocks,
            self._block_size,
        )
