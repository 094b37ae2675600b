"""State sets of a step's requests on a GPU."""

from __future__ import annotations

from typing import Self

from headwater.kernels.blocks.clear_begun import clear_begun
from headwater.kernels.rows.state_rows import SetColumns, StepRequests, load_state_rows

from ...config import EngineConfig
from ...layers.state_rows import StateRows, StateShape
from ...models.model import Model
from ..entry.step_buffers import Words
from ..table.device_table import DeviceTable
from .block_bytes import state_shape
from .kv_blocks import KvBlocks


class DeviceStates:
    """Makes the `StateRows` of a step from its words and the request table, and KV blocks of pages
    that may have held states."""

    def __init__(
        self, config: EngineConfig, table: DeviceTable, shape: StateShape, blocks: KvBlocks
    ) -> None:
        columns = config.columns
        self._columns = SetColumns(columns.first_place, columns.first_page, columns.state_pages)
        self._block_size = config.block_size
        self._max_blocks = columns.max_blocks
        self._blocks = blocks
        self._table = table
        self._shape = shape

    @classmethod
    def of(
        cls, decoder: Model, config: EngineConfig, table: DeviceTable, blocks: KvBlocks
    ) -> Self | None:
        """None: the model has no state layers."""
        shape = state_shape(decoder.config, sum(blocks.sizes), config.block_size, decoder.dtype)
        return None if shape is None else cls(config, table, shape, blocks)

    def of_step(self, words: Words) -> StateRows:
        """State sets of the step that the words hold. Clears KV blocks that the step begins."""
        requests = StepRequests(
            words.table_rows,
            words.seq_lens,
            words.chunk_rows,
            words.chunk_lens,
            words.query_starts,
        )
        made = load_state_rows(requests, self._table.block_ids, self._columns, self._block_size)
        clear_begun(
            self._blocks.words,
            made.rows,
            made.starts,
            made.ends,
            self._table.kv_pages,
            self._max_blocks,
            self._block_size,
        )
        return StateRows(
            first=made.first,
            last=made.last,
            starts=made.starts,
            ends=made.ends,
            tokens=made.tokens,
            num_decodes=len(words.table_rows),
            shape=self._shape,
        )
