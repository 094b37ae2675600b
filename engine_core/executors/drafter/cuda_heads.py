"""Draft heads on a GPU: they draft from the hidden state that the served model left at each row's
last position.

What they read of a step they read when it has sampled: by then each of its positions has its hidden
state and the token after it, so nothing has to be caught up later. Of each row one state is kept,
from which the first token of the next step is drafted; EAGLE makes the states of further drafts of
it, Medusa has a head for each place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from headwater.kernels.rows.stored_drafts import keep_states, store_drafts_and_advance

from ...config import EngineConfig
from ...heads.medusa import Medusa
from ...heads.registry import ChainHeads
from ...layers.batch import ForwardBatch, LayerCaches
from ...models.model import LastTokens, LayerInputs
from ..device.step_shapes import StepShape
from ..entry.cuda_entry import SentStep
from ..exit.device_sampler import PLAIN, DeviceSampler, Needs, Places
from ..model.device_model import DeviceModel
from ..table.device_table import DeviceTable
from .begun_blocks import AnyBlocks, BegunBlocks, ClearedBlocks, words_of
from .cuda_drafter import EVERY_NEED, PASSES, DraftingSteps, drafting_step


class PairedModel:
    """Heads as a `Model` of pairs: the features of a position, and the token after it."""

    def __init__(self, heads: ChainHeads, features: torch.Tensor) -> None:
        """features [most tokens, H] of the step that is computed, which the caller fills."""
        self._heads = heads
        self._features = features

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
        features = self._features[: len(batch.token_ids)]
        assert isinstance(kv_cache, torch.Tensor)
        return self._heads.forward(batch, features, kv_cache, attention_plan)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A `PairedModel` on a GPU, with the features that it reads."""

    model: DeviceModel
    features: torch.Tensor


class CudaHeads(ABC):
    """See `CudaDrafter`. What all heads have in common: a state of each row, and tokens that are
    drawn from logits."""

    def __init__(
        self,
        steps: DraftingSteps,
        sampler: DeviceSampler,
        config: EngineConfig,
        table: DeviceTable,
        hidden_size: int,
    ) -> None:
        """The sampler draws as that of the served model does, with the noise of the token that is
        drafted."""
        self._steps = steps
        self._sampler = sampler
        self._table = table
        device = table.token_ids.device
        dtype = sampler.dtype
        self._states = torch.zeros(config.num_rows, hidden_size, dtype=dtype, device=device)
        self._chosen = torch.zeros(config.max_positions, hidden_size, dtype=dtype, device=device)
        self.most = config.max_draft_tokens

    @property
    def shown(self) -> Self:
        return self

    def draft(self, sent: SentStep) -> None:
        plan = sent.plan
        if plan.num_drafts is None or plan.draft_ids is not None or not plan.num_drafts.any():
            return
        if plan.follows is not None:
            self._steps.find_shifts(sent)
        drafted = plan.num_drafts > 0
        rows = plan.rows[drafted]
        num_drafts = plan.num_drafts[drafted]
        # Rows that draft are decode rows: their one known token is computed before the drafts.
        step = drafting_step(
            rows, plan.starts[drafted], plan.output_indices[drafted], np.ones(len(rows), np.bool_)
        )
        shape, _ = self._steps.send(step, num_drafts, is_shifted=plan.follows is not None)
        self._launch_drafts(shape, self._steps.needs(rows), int(num_drafts.max()))

    @abstractmethod
    def _launch_drafts(self, shape: StepShape, needs: Needs, num_drafts: int) -> None:
        """Launches up to `num_drafts` drafts of each row in the buffers."""

    def _choose(self, shape: StepShape) -> torch.Tensor:
        """States of the rows in the buffers, [num_tokens, H]."""
        rows = self._steps.buffers.draws[0, : shape.num_tokens].clamp(min=0)
        return torch.index_select(self._states, 0, rows, out=self._chosen[: shape.num_tokens])

    def _draw(
        self, shape: StepShape, logits: torch.Tensor, needs: Needs, *, behind: int, advance: int
    ) -> None:
        """Draws a draft for each row, `behind` positions after its position, and advances the row
        by `advance`."""
        words, (_, _, outputs, num_left) = (
            self._steps.buffers.words(shape),
            self._steps.buffers.draws,
        )
        n = shape.num_tokens
        table = self._table
        places = Places(words.rows, words.positions, outputs[:n])
        tokens = self._sampler.draw_from(logits, table.params, table.token_ids, places, needs)
        counters = words.seq_lens, outputs[:n], num_left[:n]
        store_drafts_and_advance(
            words.rows,
            words.positions,
            tokens,
            table.token_ids,
            self._sampler.vocab_size,
            *counters,
            behind=behind,
            advance=advance,
        )

    def _decodes(self) -> list[StepShape]:
        return [
            shape
            for shape in self._steps.shapes.for_each_kernel()
            if shape.is_decode and not shape.shares
        ]


class CudaChainHeads(CudaHeads):
    """EAGLE's: keys and values of pairs lie in the served model's blocks."""

    def __init__(
        self,
        heads: ChainHeads,
        read: Pairs,
        drafting: Pairs,
        steps: DraftingSteps,
        sampler: DeviceSampler,
        config: EngineConfig,
        table: DeviceTable,
    ) -> None:
        """`read` computes the pairs of the served model's steps, in the buffers of these steps;
        `drafting` computes the pairs of drafts."""
        super().__init__(steps, sampler, config, table, heads.config.hidden_size)
        self._begun: BegunBlocks = AnyBlocks()
        if config.columns.state_pages:
            assert isinstance(drafting.model.kv_cache, torch.Tensor)
            cleared = words_of(drafting.model.kv_cache)
            self._begun = ClearedBlocks(
                cleared, steps.buffers, table, config.columns, config.block_size
            )
        self._heads = heads
        self._read = read.model
        self._drafting = drafting.model
        self._read_features = read.features
        self._features = drafting.features
        self.layers = heads.layers

    def seat(self, row: int) -> None:
        """Does nothing: the state of the row's last request is overwritten before anything is
        drafted."""

    def show(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> None:
        features = self._heads.features(final, inputs)
        self._read_features[: len(features)].copy_(features)

    def see(self, sent: SentStep, hidden: torch.Tensor) -> None:
        steps = self._read.buffers.steps[:, : sent.num_rows]
        launch = partial(self._read_pairs, sent.shape, steps)
        if self._read.shapes.recurs(sent.shape):
            self._read.graphs.run_once((sent.shape, sent.num_rows), launch)
        else:
            launch()

    def rehearse(self) -> None:
        size = self._chosen.shape[1]
        device = self._chosen.device
        for shape in self._read.shapes.for_each_kernel():
            inputs = torch.zeros(shape.num_tokens, size, dtype=self._chosen.dtype, device=device)
            self.show(inputs, dict.fromkeys(self.layers, inputs))
            self._read_pairs(shape, self._read.buffers.steps[:, :1])
        for shape in self._decodes():
            self._steps.buffers.clear(shape, shape.num_tokens)
            for needs in EVERY_NEED:
                self._first(shape, needs)
            self._passes(shape, PLAIN, 1)
        self._steps.shift(shape, 1)

    def prepare(self, shape: StepShape) -> None:
        if shape.shares:
            return
        self._steps.buffers.clear(shape, shape.num_tokens)
        self._launch(shape, PLAIN, 1 + sum(PASSES))

    def _read_pairs(self, shape: StepShape, steps: torch.Tensor) -> None:
        hidden = self._read.forward(shape)
        words = self._read.buffers.words(shape)
        keep_states(steps, self._table.known, words.positions, hidden, self._states)

    def _launch_drafts(self, shape: StepShape, needs: Needs, num_drafts: int) -> None:
        self._launch(shape, needs, num_drafts)

    def _launch(self, shape: StepShape, needs: Needs, num_drafts: int) -> None:
        graphs = self._drafting.graphs
        left = num_drafts - 1
        graphs.run_once((shape, needs), partial(self._first, shape, needs))
        for num_passes in PASSES:
            while left >= num_passes:
                launch = partial(self._passes, shape, needs, num_passes)
                graphs.run_once((shape, needs, num_passes), launch)
                left -= num_passes

    def _first(self, shape: StepShape, needs: Needs) -> None:
        """Draws the first draft from existing states. Clears blocks that drafts begin, which later
        drafts read."""
        self._begun.clear(shape)
        states = self._choose(shape)
        self._features[: len(states)].copy_(states)
        self._draw(shape, self._heads.logits(states), needs, behind=1, advance=0)

    def _passes(self, shape: StepShape, needs: Needs, num_passes: int) -> None:
        features = self._features[: shape.num_tokens]
        for _ in range(num_passes):
            hidden = self._drafting.forward(shape)
            features.copy_(hidden)
            self._draw(shape, self._heads.logits(hidden), needs, behind=2, advance=1)


class CudaParallelHeads(CudaHeads):
    """Medusa's heads: they read the served model's normed hidden state and cache nothing."""

    def __init__(
        self,
        heads: Medusa,
        served: DeviceModel,
        steps: DraftingSteps,
        sampler: DeviceSampler,
        config: EngineConfig,
        table: DeviceTable,
    ) -> None:
        super().__init__(steps, sampler, config, table, heads.hidden_size)
        self._heads = heads
        self._served = served
        self.layers: tuple[int, ...] = ()
        most = max(served.shapes.most_tokens, config.max_positions)
        self._final = torch.zeros(
            most, heads.hidden_size, dtype=self._chosen.dtype, device=self._chosen.device
        )

    def seat(self, row: int) -> None:
        """Does nothing: the state of the row's last request is overwritten before anything is
        drafted."""

    def show(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> None:
        self._final[: len(final)].copy_(final)

    def see(self, sent: SentStep, hidden: torch.Tensor) -> None:
        self._keep(sent.shape, self._served.buffers.steps[:, : sent.num_rows])

    def rehearse(self) -> None:
        for shape in self._decodes():
            self._steps.buffers.clear(shape, shape.num_tokens)
            for needs in EVERY_NEED:
                self._all(shape, needs, 1)
        self._keep(shape, self._served.buffers.steps[:, :1])
        self._steps.shift(shape, 1)

    def prepare(self, shape: StepShape) -> None:
        if shape.shares:
            return
        self._steps.buffers.clear(shape, shape.num_tokens)
        self._launch_drafts(shape, PLAIN, self._heads.num_heads)

    def _keep(self, shape: StepShape, steps: torch.Tensor) -> None:
        words = self._served.buffers.words(shape)
        keep_states(steps, self._table.known, words.positions, self._final, self._states)

    def _launch_drafts(self, shape: StepShape, needs: Needs, num_drafts: int) -> None:
        num_drafts = min(num_drafts, self._heads.num_heads)
        launch = partial(self._all, shape, needs, num_drafts)
        self._served.graphs.run_once((shape, "drafts", needs, num_drafts), launch)

    def _all(self, shape: StepShape, needs: Needs, num_drafts: int) -> None:
        states = self._choose(shape)
        for head in range(num_drafts):
            self._draw(shape, self._heads.logits(head, states), needs, behind=1, advance=1)
