"""Forward passes of small steps on a CPU, recorded once and then replayed: one call from Python
instead of one a kernel. Without it, a step of one row of a small model spends as much time between
its kernels as in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from headwater.kernels.cpu.attention import AttentionPlan
from headwater.kernels.cpu.compiler.recording import UnrecordableError, recording
from headwater.kernels.cpu.compiler.replay import Replay

from ...layers.batch import ForwardBatch, LayerCaches
from ...layers.embedding import Embedding
from ...layers.platform import Platform, plans_of
from ...models.model import LastTokens, LayerInputs, Model

MAX_TOKENS = 32
"""Tokens of the largest step that is recorded. Products take nearly all of the time of a larger
one."""
MAX_STEPS = 16
"""Most recorded steps that are kept, least recently used dropped first."""
_MAX_SEEN = 64
"""Shapes of steps that are remembered until they come a second time."""
_Key = tuple[bytes, int, int, bool]


class ReplayedSteps:
    """A model's forward pass. A step's shape is the number of tokens of each request; the second
    step of a shape is recorded.

    The pass reads nothing of a batch but its tensors and the attention plan, and no number of them
    outside of the platform's kernels: see `recording`. A model that computes with torch between its
    kernels is not recorded."""

    def __init__(self, model: Model, platform: Platform, max_blocks: int) -> None:
        """`max_blocks`: the most KV blocks of a request. The platform's kernels and attention plans
        are the CPU's."""
        self._model = model
        self._platform = platform
        self._max_blocks = max_blocks
        self._steps: OrderedDict[_Key, _Step] = OrderedDict()
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        # The number of latents that a token chooses depends on its position.
        self._is_recordable = model.config.index is None

    @property
    def num_kept(self) -> int:
        """Number of recorded steps that are kept."""
        return len(self._steps)

    def __call__(
        self,
        batch: ForwardBatch,
        kv_cache: LayerCaches,
        *,
        ends: LastTokens | None = None,
        inputs: LayerInputs | None = None,
    ) -> torch.Tensor:
        """Like `Model.forward`."""
        if (
            self._is_recordable
            and ends is None
            and inputs is None
            and len(batch.token_ids) <= MAX_TOKENS
        ):
            has_adapters = batch.adapter_of_row is not None
            threads = torch.get_num_threads()
            key = batch.counts.tobytes(), threads, kv_cache[0].data_ptr(), has_adapters
            if (step := self._steps.get(key)) is not None:
                self._steps.move_to_end(key)
                return step(batch)
            if self._is_second(key) and (hidden := self._record(key, batch, kv_cache)) is not None:
                return hidden
        return self._model.forward(batch, kv_cache, ends=ends, inputs=inputs)

    def _is_second(self, key: _Key) -> bool:
        if key in self._seen:
            del self._seen[key]
            return True
        self._seen[key] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def _record(self, key: _Key, batch: ForwardBatch, kv_cache: LayerCaches) -> torch.Tensor | None:
        """Computes a step and records it for later steps of its shape; None: it cannot be recorded,
        and is not computed yet."""
        step = _Step(self._model, self._platform, batch, self._max_blocks)
        try:
            hidden = step.record(batch, kv_cache)
        except UnrecordableError:
            # Neither is any other of the model's steps.
            self._is_recordable = False
            return None
        self._steps[key] = step
        if len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)
        return hidden


class _Step:
    """Buffers that a recorded step reads, and its replay."""

    def __init__(
        self, model: Model, platform: Platform, batch: ForwardBatch, max_blocks: int
    ) -> None:
        num_tokens = len(batch.token_ids)
        num_requests = len(batch.counts)
        self._model = model
        self._residual = torch.empty(num_tokens, model.config.hidden_size, dtype=model.dtype)
        positions = torch.empty(num_tokens, dtype=torch.int64)
        adapters = None if batch.adapter_of_row is None else torch.empty_like(batch.adapter_of_row)
        states = None if batch.states is None else batch.states.empty_like()

        def own(each: ForwardBatch) -> ForwardBatch:
            return replace(
                each,
                positions=positions,
                slots=torch.empty(num_tokens, dtype=torch.int64),
                block_tables=torch.zeros(num_requests, max_blocks, dtype=torch.int32),
                adapter_of_row=adapters,
                states=states,
            )

        self._batch = replace(own(batch), page_groups=tuple(map(own, batch.page_groups)))
        self._plans: AttentionPlan | list[AttentionPlan] = plans_of(platform, self._batch)
        self._tiles = [each.tiles for each in _several(self._plans)]
        self._requests = self._tiles[0][:, 4].copy()
        self._replay: Replay | None = None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, H] of a step of the recorded shape."""
        assert self._replay is not None
        self._fill(batch)
        return self._replay()

    def record(self, batch: ForwardBatch, kv_cache: LayerCaches) -> torch.Tensor:
        """Computes the step and records it. Raises `UnrecordableError`."""
        self._fill(batch)
        with _starting_with(self._model, self._residual), recording() as calls:
            hidden = self._model.forward(self._batch, kv_cache, self._plans)
        self._replay = Replay(calls, hidden)
        return hidden

    def _fill(self, batch: ForwardBatch) -> None:
        own = self._batch
        self._residual.copy_(self._model.embedding(batch.token_ids))
        own.positions.copy_(batch.positions)
        if own.adapter_of_row is not None:
            assert batch.adapter_of_row is not None
            own.adapter_of_row.copy_(batch.adapter_of_row)
        if own.states is not None:
            assert batch.states is not None
            own.states.copy_(batch.states)
        groups = zip(own.page_groups or (own,), batch.page_groups or (batch,), strict=True)
        for own_group, group in groups:
            own_group.slots.copy_(group.slots)
            own_group.block_tables[:, : group.block_tables.shape[1]] = group.block_tables
        for tiles in self._tiles:
            np.take(batch.starts, self._requests, out=tiles[:, 1])


def _several(plans: AttentionPlan | list[AttentionPlan]) -> list[AttentionPlan]:
    return plans if isinstance(plans, list) else [plans]


@contextmanager
def _starting_with(model: Model, residual: torch.Tensor) -> Iterator[None]:
    """Context in which the model's forward pass starts from these rows instead of its
    embedding's."""
    embedding = model.embedding
    model.embedding = cast(Embedding, lambda token_ids: residual)
    try:
        yield
    finally:
        model.embedding = embedding
