"""The words of a step on a device that computes at once: a batch of what the request table
holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ...config import EngineConfig
from ...executor import Int32Array, StepPlan
from ...layers.batch import ForwardBatch
from ...models.model import LastTokens, LayerInputs, Model
from ...ragged import last_elements
from ..table.batch import make_batch, num_sampled
from ..table.eager_table import EagerTable
from ..table.known_positions import at_known_positions, with_at_most
from .eager_states import StepStates


@dataclass(frozen=True, slots=True)
class EagerStep:
    """A step whose plan is in the request table."""

    plan: StepPlan
    """Plan with known positions of its rows and known numbers of drafts."""
    num_sampled: Int32Array
    """[R] positions of each row, the last ones, after which a token is sampled."""
    has_ends: bool
    """Whether only the hidden states of some positions leave the last layer."""
    inputs: LayerInputs | None
    """Inputs of layers that the drafter reads; None: it reads none."""

    @property
    def num_drafts(self) -> Int32Array:
        """[R] drafts of each row."""
        return _drafts_of(self.plan)

    @property
    def num_drafted(self) -> Int32Array:
        """[R] drafts of each row that the plan leaves to the executor."""
        return _drafted_of(self.plan)

    @property
    def ends(self) -> Int32Array:
        """[R] position after the last known token of each row."""
        return self.plan.starts + self.plan.counts - self.num_drafts

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """Picks the hidden states [P, H] of the sampled positions from those that left the last
        layer."""
        counts = self.plan.counts
        if self.has_ends or int(self.num_sampled.sum()) == len(hidden):
            return hidden
        sampled = torch.from_numpy(last_elements(counts, self.num_sampled))
        return hidden[sampled.to(hidden.device)]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step as its layers read it."""

    batch: ForwardBatch
    ends: LastTokens | None
    """Tokens whose hidden states leave the last layer; None: all tokens."""
    inputs: LayerInputs | None


class EagerEntry:
    """See `Entry`."""

    def __init__(
        self,
        table: EagerTable,
        decoder: Model,
        config: EngineConfig,
        device: torch.device,
        *,
        looks_at_all: bool,
        most_drafts: int,
        inputs: tuple[int, ...],
        group_of_layer: tuple[int, ...],
        states: StepStates,
    ) -> None:
        """`looks_at_all`: hidden states of all tokens are read in any step. `inputs`: layers of
        which what drafts reads the inputs, in steps with up to `most_drafts` drafts of a row.
        `group_of_layer`: see `ForwardBatch`."""
        self._table = table
        self._decoder = decoder
        self._block_size = config.block_size
        self._device = device
        self._looks_at_all = looks_at_all
        self._most_drafts = most_drafts
        self._inputs = inputs
        self._group_of_layer = group_of_layer
        self._states = states
        self._block_ids = table.block_ids[:, : config.columns.first_place]

    def adopt(self, decoder: Model) -> None:
        """Computes later steps with another model of the same shapes."""
        self._decoder = decoder

    def send(self, plan: StepPlan) -> EagerStep:
        plan = at_known_positions(plan, self._table.num_known)
        self._table.apply(plan)
        plan = with_at_most(plan, self._most_drafts)
        self._states.clear(plan)
        count = num_sampled(plan)
        has_ends = not (self._looks_at_all or plan.looks_at_all)
        inputs = LayerInputs(self._inputs) if self._inputs else None
        return EagerStep(plan, count, has_ends and int(count.sum()) < plan.num_tokens, inputs)

    def take(self, sent: EagerStep) -> StepBatch:
        table = self._table
        tables = table.token_ids, self._block_ids
        batch = make_batch(sent.plan, *tables, self._block_size, self._group_of_layer)
        batch = replace(
            batch,
            adapter_of_row=table.adapters_of(sent.plan),
            states=self._states.of_step(sent.plan),
        ).to(self._device)
        ends = self._decoder.ends(batch, sent.num_sampled) if sent.has_ends else None
        return StepBatch(batch, ends, sent.inputs)


def _drafts_of(plan: StepPlan) -> Int32Array:
    return np.zeros(len(plan.rows), np.int32) if plan.num_drafts is None else plan.num_drafts


def _drafted_of(plan: StepPlan) -> Int32Array:
    num_drafts = _drafts_of(plan)
    return num_drafts if plan.draft_ids is None else np.zeros_like(num_drafts)
