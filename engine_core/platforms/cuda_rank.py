"""Operations of one of several GPUs that compute a model together."""

from __future__ import annotations

import torch

from headwater.kernels.quant.token_rounding import RoundedTokens, Rounding, round_tokens

from ..config import EngineConfig
from ..weights.model_config import ModelConfig
from .cuda import CudaPlatform
from .cuda_products import EARLY_ROWS
from .peer_group import PeerGroup


class SummingPlatform(CudaPlatform):
    """See `Platform`. Products that are added to the residual stream are partial: the ranks' parts
    are summed in the launch that adds them. For models with `Model.adds_products`."""

    _group: PeerGroup

    @classmethod
    def over(cls, group: PeerGroup, model: ModelConfig, config: EngineConfig) -> CudaPlatform:
        """`model` has the shapes of this rank's layers."""
        platform = cls.of(model, config)
        assert isinstance(platform, cls)
        platform._group = group
        return platform

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        dependent = x.shape[0] <= EARLY_ROWS
        return self._group.sum_add_rms_norm(x, residual, weight, eps, dependent=dependent)

    def rounded_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounds_to: Rounding,
    ) -> RoundedTokens:
        normed = self.add_rms_norm(x, residual, weight, eps)
        return round_tokens(normed, rounds_to, dependent=x.shape[0] <= EARLY_ROWS)
