"""Models that `accuracy` compares: each reads a window of text in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executors.build.engine_limits import engine_config_of
from headwater.engine_core.executors.build.loader import Loader
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.model.block_bytes import kv_layouts
from headwater.engine_core.executors.model.kv_blocks import KvBlocks
from headwater.engine_core.executors.ranks.rank import whole_rank
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.linear.kinds import Weights
from headwater.engine_core.models.model import Model, model_class
from headwater.engine_core.options import INT8, BuildRequest, ExecutorOptions
from headwater.services.runtime.progress import silent

CPU = "cpu"
DEVICES = {CPU: cpu, "cuda": cuda}
ROUNDED_NAMES = {torch.int8: INT8, torch.float8_e4m3fn: "fp8"}


class WholeModel:
    """A model on a device, cpu or cuda, that reads windows of a text from their beginning."""

    def __init__(self, options: ExecutorOptions, window: int) -> None:
        self._device = torch.device(options.device)
        device = DEVICES[options.device]
        request = checked(options, device.name, device.capabilities)
        self.dtype = request.dtype
        self._window = window
        config = engine_config_of(request, 0)
        model = request.model
        loader = Loader(device, whole_rank(model), config, silent)
        platform, weights = loader.served(request)
        self.activations = _activations(request, weights)
        self._model: Model = model_class(model)(model, weights, platform, config.max_model_len)
        blocks = -(-window // config.block_size)
        layouts = kv_layouts(request)
        made = KvBlocks.allocated(layouts, blocks, config.block_size, self._device)
        self._kv_cache = made.kv_caches[0]
        self._block_tables = torch.arange(blocks, dtype=torch.int32)[None]

    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Hidden states of a window, [T, H]."""
        positions = torch.arange(len(token_ids))
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=positions,
            slots=positions,
            starts=np.zeros(1, np.int32),
            counts=np.array([len(token_ids)], np.int32),
            block_tables=self._block_tables,
            sampled=positions[:0],
        )
        return self._model.forward(batch.to(self._device), self._kv_cache)

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log probabilities of hidden [S, H], float32 [S, V]."""
        return self._model.logits(hidden).float().log_softmax(-1)


class ExactModel(WholeModel):
    """Model that several others are compared with; its results for each window are computed
    once."""

    def __init__(self, options: ExecutorOptions, window: int) -> None:
        super().__init__(options, window)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        key = tuple(token_ids)
        if key not in self._known:
            # A forward pass may write where an earlier one has.
            self._known[key] = super().hidden(token_ids).clone()
        return self._known[key]


exact_model = lru_cache(maxsize=1)(ExactModel)


def _activations(request: BuildRequest, weights: Weights) -> str:
    """Number format that products round activations to: that of layers that round tokens, else the
    request's."""
    rounded = {
        each.rounds_to.dtype for each in weights.linears.values() if each.rounds_to is not None
    }
    return " and ".join(sorted(ROUNDED_NAMES[dtype] for dtype in rounded)) or request.activations
