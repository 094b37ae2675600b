"""A model whose modelling code is that of transformers; attention, products and head are ours."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...config import ConfigError
from ...executor import Int32Array
from ...layers.batch import ForwardBatch, LayerCaches, last_tokens
from ...layers.embedding import Embedding
from ...layers.linear.kinds import Weights
from ...layers.lm_head import LMHead
from ...layers.platform import Platform, plans_of
from ...layers.rope import unrotated_table
from ...weights.layout import Layout
from ...weights.model_config import ModelConfig
from ..model import LastTokens, LayerInputs
from .assembly import OwnParts
from .attends import OwnValue, PagedAttention
from .head import ModuleHead
from .interface import ForwardPass
from .names import ForeignNames
from .probe import EMBED, HEAD, base_of, facts_of
from .row_wise import RowWise
from .version import transformers_version

log = logging.getLogger(__name__)
NUM_CHECKED = 5
"""Tokens whose bits are compared, alone and in company, before a model serves."""


class ForeignModel:
    """See `Model`."""

    reads_page_groups = True
    names = ForeignNames(model={}, layer={}, fused={})

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        assert config.foreign is not None
        self.config = config
        self.embedding = Embedding(weights.table(EMBED))
        self.dtype = self.embedding.dtype
        self._platform = platform
        self._mode = RowWise()
        self._pass = ForwardPass()
        self._unrotated = unrotated_table(config, max_model_len).to(platform.device)
        own = OwnParts(platform, weights, self._mode, max_model_len)
        module: Any = own.put_in(config.foreign, self.embedding)
        self._pass.hand_to(module)
        self._base = base_of(module)
        self.lm_head = LMHead(platform, ModuleHead(module, weights.linears[HEAD], self._mode))
        self.final_norm = NoNorm()
        self._run_dry()
        how = "recorded in graphs" if platform.device.type == "cuda" else "computed at once"
        log.warning(
            "modelling code of transformers %s: %s; attention, products and head are Headwater's; "
            "steps are %s",
            *(transformers_version(), config.architecture, how),
        )

    @staticmethod
    def layout(config: ModelConfig) -> Layout:
        assert config.foreign is not None
        return facts_of(config.foreign).layout

    @staticmethod
    def adds_products(config: ModelConfig) -> bool:
        return False

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
        """See `Model`. All layers compute all tokens, whatever is asked for."""
        assert inputs is None or not inputs.layers
        plans = attention_plan or plans_of(self._platform, batch)
        self._pass.attends = PagedAttention(
            platform=self._platform,
            mode=self._mode,
            config=self.config,
            unrotated=self._unrotated,
            batch=batch,
            kv_cache=kv_cache,
            plans=plans if batch.page_groups else [plans],
        )
        hidden = self._hidden(batch.token_ids, batch.positions)
        return hidden if ends is None else hidden.index_select(0, ends.tokens)

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        own = last_tokens(batch, num_wanted)
        return LastTokens(own.sampled, None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def _hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, H]"""
        with self._mode:
            made = self._base(
                token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            )
        hidden: torch.Tensor = made[0]
        return hidden.squeeze(0)

    @torch.inference_mode()
    def check_rows(self) -> None:
        """Checks the model once products are chosen. Raises `ConfigError` where a token's bits
        depend on tokens beside it that attention does not show it."""
        self._pass.attends = OwnValue(self._mode)
        device = self._platform.device
        ids = torch.arange(NUM_CHECKED, device=device) * 7 % self.config.vocab_size
        at = torch.arange(NUM_CHECKED, device=device).flip(0) % len(self._unrotated)
        together = self._hidden(ids, at)
        turned = self._hidden(ids.flip(0), at.flip(0)).flip(0)
        alone = self._hidden(ids[1:2], at[1:2])
        if not (torch.equal(together, turned) and torch.equal(together[1:2], alone)):
            allowed = "layers that join tokens by attention alone, with equal bits in any batch"
            raise ConfigError("modelling code", self.config.architecture, allowed)

    @torch.inference_mode()
    def _run_dry(self) -> None:
        """Makes what the module makes once, its rotary tables above all, before anything is
        recorded. Raises `ConfigError` for code that a GPU would wait for."""
        self._pass.attends = OwnValue(self._mode)
        zeros = torch.zeros(1, dtype=torch.int64, device=self._platform.device)
        self._mode.is_dry = True
        try:
            with _without_waiting(self._platform.device):
                self._hidden(zeros, zeros)
        except RuntimeError as error:
            allowed = f"code that a GPU can record ({error})"
            raise ConfigError("modelling code", self.config.architecture, allowed) from None
        finally:
            self._mode.is_dry = False


@contextmanager
def _without_waiting(device: torch.device) -> Iterator[None]:
    """Scope in which torch raises `RuntimeError` where the host waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # It does not find every place that waits, of which the first use of it warns.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class NoNorm:
    """See `LastNorm`: the module has its own."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        raise AssertionError("stages are refused")
