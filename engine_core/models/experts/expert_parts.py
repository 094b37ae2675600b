"""The mixture of experts of a layer, made of the model's config and weights."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from ...config import ConfigError
from ...layers.experts import Experts, ExpertsBesideMlp, SharedExpert
from ...layers.linear.dense import DenseLinear
from ...layers.linear.kinds import Weights
from ...layers.linear.linear import Linear, Product
from ...layers.mlp import Mlp, PlainMlp
from ...layers.norm import Norm, RMSNorm
from ...layers.platform import ExpertPlatform, Platform
from ...layers.routing import ExpertStack, Router, Scoring
from ...weights.experts_config import ExpertsConfig
from ...weights.model_config import ModelConfig
from . import mixture


def check_unrounded(linear: Linear, config: ModelConfig) -> None:
    """Raises `ConfigError` for a linear layer that reads 8-bit activations, where nothing rounds
    them."""
    if linear.rounds_to is not None:
        allowed = f"model with {config.architecture}, of which no norm or activation is rounded"
        raise ConfigError("activation_dtype", "auto", allowed)


class ExpertParts:
    """Makes the experts of one layer by the names of the layout, which begin with a prefix."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        platform: Platform,
        prefix: str,
        counts: torch.Tensor,
    ) -> None:
        """counts int64 [E] of the layer's rows; see `Router.counts`."""
        self._config = config
        self._weights = weights
        self._platform = platform
        self._prefix = prefix
        self._counts = counts

    def experts(self, norm: Norm | None = None) -> Experts:
        """`norm`: what the experts read is its result, see `Experts.behind`."""
        sizes = self._config.experts
        assert sizes is not None
        shared = None
        if sizes.shared_size:
            shared = self._shared_expert(has_gate=sizes.has_shared_gate)
        return Experts(
            cast(ExpertPlatform, self._platform),
            self._router(sizes),
            self._logits(),
            *self._stacks(sizes),
            self._config.activation,
            self._weights.group,
            shared,
            scales_inputs=sizes.scales_inputs,
            expert_scales=self._weights.tensors.get(self._prefix + mixture.EXPERT_SCALES),
            norm=norm,
            router_weight=self._router_weight(),
        )

    def beside_mlp(self) -> ExpertsBesideMlp:
        """The experts with the norms of inputs and outputs of experts, router and MLP."""
        config = self._config
        return ExpertsBesideMlp(
            self.experts(),
            self._norm(mixture.ROUTER_NORM, config.hidden_size**-0.5),
            self._norm(mixture.DENSE_NORM),
            self._norm(mixture.EXPERTS_INPUT_NORM),
            self._norm(mixture.EXPERTS_NORM),
        )

    def _norm(self, name: str, factor: float = 1.0) -> RMSNorm:
        factors = self._weights.tensors[self._prefix + name]
        eps = self._config.rms_norm_eps
        return RMSNorm(self._platform, factors if factor == 1 else factors * factor, eps)

    def _stacks(self, sizes: ExpertsConfig) -> tuple[ExpertStack, ExpertStack]:
        """Weights of gates and ups, and behind them. Where ranks divide the inputs of the latter,
        the first rank alone adds their biases."""
        gate_up, down = (
            replace(self._weights.experts[self._prefix + name], is_share=sizes.own is not None)
            for name in (self._first_name, mixture.DOWN)
        )
        if not sizes.has_biases:
            return gate_up, down
        of_gate_up, of_down = (
            self._weights.tensors[self._prefix + name].view(stack.num_experts, -1)
            for name, stack in ((mixture.GATE_UP_BIAS, gate_up), (mixture.DOWN_BIAS, down))
        )
        adds_biases = sizes.are_whole or self._weights.group.index == 0
        return (
            replace(gate_up, bias=of_gate_up),
            replace(down, bias=of_down if adds_biases else torch.zeros_like(of_down)),
        )

    @property
    def _first_name(self) -> str:
        """Name of the weights of the first product of experts."""
        return mixture.GATE_UP if self._config.is_gated else mixture.UP

    def _router(self, sizes: ExpertsConfig) -> Router:
        return Router(
            num_chosen=sizes.num_chosen,
            scoring=Scoring.SIGMOID if sizes.is_sigmoid else Scoring.SOFTMAX,
            is_normalized=sizes.is_normalized,
            scale=sizes.scale,
            bias=self._weights.tensors.get(self._prefix + mixture.ROUTER_BIAS),
            correction=self._weights.tensors.get(self._prefix + mixture.CORRECTION),
            num_groups=sizes.num_groups,
            num_chosen_groups=sizes.num_chosen_groups,
            num_group_scores=sizes.num_group_scores,
            own=sizes.own,
            counts=self._counts,
        )

    def _router_weight(self) -> torch.Tensor | None:
        """[E, H]; None: it is no plain matrix of the model's dtype."""
        linear = self._weights.linears.get(self._prefix + mixture.ROUTER)
        return linear.weight if isinstance(linear, DenseLinear) else None

    def _logits(self) -> Product:
        """The product with a router's weight; a wide router reads tokens in its own type."""
        name = self._prefix + mixture.ROUTER
        if name in self._weights.linears:
            return self._platform.linear(self._weights.linears[name])
        product = self._platform.linear(DenseLinear(self._weights.tensors[name]))
        return lambda x: product(x.float())

    def _shared_expert(self, *, has_gate: bool) -> SharedExpert:
        is_gated = self._config.is_gated
        first = self._prefix + (mixture.SHARED_GATE_UP if is_gated else mixture.SHARED_UP)
        down = self._prefix + mixture.SHARED_DOWN
        linears = self._weights.linears
        if not is_gated:
            for name in (first, down):
                check_unrounded(linears[name], self._config)
        made = Mlp if is_gated else PlainMlp
        mlp = made(self._platform, linears[first], linears[down], self._config.activation)
        gate = linears[self._prefix + mixture.SHARED_GATE] if has_gate else None
        return SharedExpert(self._platform, mlp, gate)
