"""A model on a GPU, with its KV cache and the buffers of the current step. Launches a step's
layers; knows nothing about sampling."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from headwater.kernels.rows.step_rows import load_adapters, load_tokens

from ...config import EngineConfig
from ...executor import Int32Array
from ...layers.batch import ForwardBatch, LayerCaches
from ...models.model import LastTokens, LayerInputs
from ...platforms.cuda import CudaPlatform
from ...platforms.cuda_attention import is_read_by_hopper
from ...platforms.cuda_attention_plans import DEPENDENT_ROWS, AttentionPlan
from ..device.cuda_graphs import Graphs
from ..device.step_shapes import StepShape, StepShapes, aligned
from ..entry.step_buffers import StepBuffers
from ..table.device_table import DeviceTable
from .device_states import NoStates, StepStates
from .kv_blocks import first_kv_cache
from .shown import NotShown, Shown

_UNUSED: Int32Array = np.empty(0, np.int32)
"""Stands for arrays of a batch that only a CPU reads."""


class Forward(Protocol):
    """The pass of a `Model`, or of what computes as one does."""

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: LayerCaches,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
        num_layers: int | None = None,
        inputs: LayerInputs | None = None,
    ) -> torch.Tensor:
        """See `Model`."""


class StageStreams(Protocol):
    """Transfers of a pipeline stage's residual stream before and after its layers, where the
    layers' own launches do not transfer it."""

    def take(self, num_tokens: int) -> None:
        """Receives the stream of so many tokens that the next layers begin with."""

    def give(self, stream: torch.Tensor) -> None:
        """Sends the stream [T, H] that layers have ended with."""


class NoStreams:
    """See `StageStreams`: layers begin with tokens, or receive and send streams themselves."""

    def take(self, num_tokens: int) -> None:
        pass

    def give(self, stream: torch.Tensor) -> None:
        pass


class DeviceModel:
    def __init__(
        self,
        decoder: Forward,
        platform: CudaPlatform,
        config: EngineConfig,
        kv_cache: LayerCaches,
        table: DeviceTable,
        buffers: StepBuffers,
        shapes: StepShapes,
        graphs: Graphs,
        *,
        is_paired: bool = False,
        group_of_layer: tuple[int, ...] = (),
        states: StepStates | None = None,
        streams: StageStreams | None = None,
    ) -> None:
        """`is_paired`: the token of a position is the one after it. `group_of_layer`: see
        `ForwardBatch`. `states`: of a model with state layers. `streams`: of a pipeline stage."""
        self.decoder = decoder
        self.platform = platform
        self.kv_cache = kv_cache
        self.graphs = graphs
        self.buffers = buffers
        self.shapes = shapes
        self._table = table
        self._group_of_layer = group_of_layer
        self._states = states or NoStates()
        self._block_size = config.block_size
        # Folds are measured with the caches that the kernels for Hopper serve; with fp8 and blocks
        # of 16 their state does not fit in registers.
        first = first_kv_cache(kv_cache)[0]
        self._can_fold = platform.plans.can_fold and is_read_by_hopper(first)
        self._token_ids = table.token_ids[:, 1:] if is_paired else table.token_ids
        self.shown: Shown = NotShown()
        """Reader that gets, within each forward pass, the inputs of the layers that it names and
        the result."""
        self._streams = streams or NoStreams()

    def hidden(self, shape: StepShape) -> torch.Tensor:
        """Launches the step of this shape that the buffers hold. Returns its hidden states,
        [num_tokens, H] or [num_ends, H]."""
        self._streams.take(shape.num_tokens)
        launch = partial(self.forward, shape)
        if shape.is_decode:
            hidden = self.graphs.replay(shape, launch, partial(self.try_out, shape))
        else:
            hidden = self.graphs.run(shape, launch) if self.shapes.recurs(shape) else launch()
        self._streams.give(hidden)
        return hidden

    def prepare(self, shape: StepShape) -> torch.Tensor:
        """Captures the shape; see `Graphs.prepare`."""
        return self.graphs.prepare(
            shape, partial(self.forward, shape), partial(self.try_out, shape)
        )

    def try_out(self, shape: StepShape) -> None:
        """Launches a step of two layers: all layers but the last are alike, so no other kernels are
        left."""
        self.forward(shape, num_layers=2)

    def rehearse(self, shape: StepShape) -> None:
        """Launches each kernel of the shape, while launches are recorded, not executed."""
        self.forward(shape, num_layers=2)
        if shape.num_ends and len(self.kv_cache) == 1:
            # Only in a step that looks at all tokens does the one layer compute more than the ends.
            self.forward(replace(shape, num_ends=0), num_layers=2)

    def forward(self, shape: StepShape, num_layers: int | None = None) -> torch.Tensor:
        """Like `hidden`, without a CUDA graph."""
        words = self.buffers.words(shape)
        table = self._table
        device = self.platform.device
        token_ids = torch.empty(shape.num_tokens, dtype=torch.int64, device=device)
        tables = table.block_tables
        # Slots of each page group begin at a multiple of 16 bytes, which kernels ask for.
        slots = torch.empty(
            len(tables), aligned(shape.num_tokens), dtype=torch.int32, device=device
        )[:, : shape.num_tokens]
        load_tokens(
            words.rows,
            words.positions,
            self._token_ids,
            table.kv_pages,
            self._block_size,
            token_ids,
            slots,
        )
        attention = AttentionPlan(
            num_decodes=shape.num_decodes,
            seq_lens=words.seq_lens,
            table_rows=words.table_rows,
            block_tables=tables[0],
            decode=self.platform.plans.decode(shape.num_decodes, folds=self._folds(shape)),
            windowed=self.platform.plans.windowed(shape.num_decodes),
            shares=shape.shares,
            chunk_lens=words.chunk_lens,
            chunk_rows=words.chunk_rows,
            query_starts=words.query_starts,
            tiles=words.tiles.view(-1, 2),
            dependent=shape.num_tokens <= DEPENDENT_ROWS,
        )
        self.platform.plans.refresh(attention)
        ends = None
        if shape.num_ends:
            last = self._group_of_layer[-1] if self._group_of_layer else 0
            where = words.end_lens, words.end_rows, tables[last]
            plan = self.platform.plans.of_ends(
                *where, shares=shape.shares, folds=self._folds(shape)
            )
            ends = LastTokens(words.end_tokens, plan)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=words.positions,
            slots=slots[0],
            starts=_UNUSED,
            counts=_UNUSED,
            block_tables=tables[0],
            sampled=slots[0, :0],
            adapter_of_row=load_adapters(words.rows, table.params) if shape.has_adapters else None,
            states=self._states.of_step(words),
        )
        given: tuple[Any, ...] = batch, self.kv_cache, attention
        if self._group_of_layer:
            given = self._by_page_group(batch, slots), self.kv_cache, self._plans(attention)
        if num_layers is not None:
            return self.decoder.forward(*given, ends=ends, num_layers=num_layers)
        inputs = LayerInputs(self.shown.layers)
        hidden = self.decoder.forward(*given, ends=ends, inputs=inputs)
        self.shown.show(hidden, inputs.states)
        return hidden

    def _by_page_group(self, batch: ForwardBatch, slots: torch.Tensor) -> ForwardBatch:
        """The batch with slots [G, T] and the block tables of each page group."""
        groups = tuple(
            replace(batch, slots=own_slots, block_tables=table)
            for own_slots, table in zip(slots, self._table.block_tables, strict=True)
        )
        return replace(batch, page_groups=groups, group_of_layer=self._group_of_layer)

    def _plans(self, plan: AttentionPlan) -> list[AttentionPlan]:
        """The attention plan of each page group. Groups divide the same work: rows that share
        blocks share them in each group."""
        return [replace(plan, block_tables=table) for table in self._table.block_tables]

    def _folds(self, shape: StepShape) -> bool:
        return self._can_fold and not shape.shares
