"""State sets of a step's requests on a GPU."""

from __future__ import annotations

from typing import Protocol

from headwater.kernels.blocks.clear_begun import clear_begun
from headwater.kernels.rows.state_rows import SetColumns, StepRequests, load_state_rows
from headwater.kernels.states.set_layout import SetLayout

from ...config import EngineConfig
from ...layers.state_rows import StateRows
from ...models.model import Model
from ..entry.step_buffers import Words
from ..table.device_table import DeviceTable
from .block_bytes import set_layout
from .kv_blocks import KvBlocks


class StepStates(Protocol):
    """State sets of a model's steps."""

    def of_step(self, words: Words) -> StateRows | None:
        """State sets of the step that the words hold; None: the model has no state layers."""


class NoStates:
    """See `StepStates`: the model has no state layers."""

    def of_step(self, words: Words) -> None:
        pass


class DeviceStates:
    """See `StepStates`. Makes the `StateRows` of a step from its words and the request table, and
    clears KV blocks of pages that may have held states."""

    def __init__(
        self, config: EngineConfig, table: DeviceTable, layout: SetLayout, blocks: KvBlocks
    ) -> None:
        columns = config.columns
        self._columns = SetColumns(columns.first_place, columns.first_page, columns.state_pages)
        self._block_size = config.block_size
        self._max_blocks = columns.max_blocks
        self._blocks = blocks
        self._table = table
        self._layout = layout

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
            layout=self._layout,
        )


def states_of(
    decoder: Model, config: EngineConfig, table: DeviceTable, blocks: KvBlocks
) -> StepStates:
    layout = set_layout(decoder.config, sum(blocks.sizes), config.block_size, decoder.dtype)
    return NoStates() if layout is None else DeviceStates(config, table, layout, blocks)
