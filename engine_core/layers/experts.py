"""A mixture of experts in the place of an MLP. Source: Shazeer et al., "Outrageously large neural
networks", 2017."""

from __future__ import annotations

from typing import cast

import torch

from .linear.dense import DenseLinear
from .linear.linear import Linear, Product
from .mlp import Mlp, PlainMlp
from .norm import LayerNorm, Norm, RMSNorm
from .platform import (
    ExpertPlatform,
    JoiningPlatform,
    NormingPlatform,
    Platform,
    SharingPlatform,
)
from .process_group import Group
from .routing import ExpertProduct, ExpertStack, NormedRoutes, Router, Routes, SharedLinears

PlainNorm = RMSNorm | LayerNorm
"""Norms whose result is not rounded to fewer bits."""


class SharedExpert:
    """An expert that every token has, some of them times the sigmoid of a product of their own."""

    def __init__(self, platform: Platform, mlp: Mlp | PlainMlp, gate: Linear | None) -> None:
        """gate [1, H]; None: it is added as it is."""
        self._platform = platform
        self._mlp = mlp
        self._linears = None
        if isinstance(mlp, Mlp):
            self._linears = SharedLinears(mlp.gate_up, mlp.down, gate)
        self._gate = None if gate is None else platform.linear(gate)
        self._weight: torch.Tensor | None = None
        """Weight of the gate, where the platform reads it as it adds the expert."""
        if gate is not None and gate.kind == DenseLinear.kind:
            assert isinstance(gate, DenseLinear)
            self._weight = gate.weight if isinstance(platform, SharingPlatform) else None

    def added_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The sum of out [T, H] and of the expert of x [T, H]."""
        shared = self._mlp(x)
        if self._weight is not None:
            return cast(SharingPlatform, self._platform).gated_sum(out, shared, x, self._weight)
        if self._gate is not None:
            shared = self._platform.activation(self._gate(x), "sigmoid") * shared
        return out + shared

    def joined_with(
        self, gate_up: ExpertStack, down: ExpertStack, activation: str, apart: ExpertProduct
    ) -> ExpertProduct:
        """`apart`, a shared expert's product that is added to the others, with fewer launches where
        the platform has such."""
        if self._linears is None or not isinstance(self._platform, JoiningPlatform):
            return apart
        return self._platform.joint_experts(gate_up, down, self._linears, activation, apart)


class Experts:
    """Sum of the experts that a router chooses for a token, each times its weight, and of the
    shared expert if there is one. Ranks hold a part of every expert, or some whole experts."""

    def __init__(
        self,
        platform: ExpertPlatform,
        router: Router,
        logits: Product,
        gate_up: ExpertStack,
        down: ExpertStack,
        activation: str,
        group: Group,
        shared: SharedExpert | None = None,
        *,
        scales_inputs: bool = False,
        expert_scales: torch.Tensor | None = None,
        norm: Norm | None = None,
        router_weight: torch.Tensor | None = None,
    ) -> None:
        """`logits`: the router's product, x [T, H] → [T, E]. gate_up of 2 I outputs, gates first,
        or of I without gates, and down of H; activation as in `ExpertPlatform.experts`.
        `scales_inputs`: see `ExpertsConfig`. expert_scales [E]: factors of the experts' weights;
        not where ranks have whole experts. `norm`: of `behind`; router_weight [E, H], where it is a
        plain matrix."""
        self._platform = platform
        self._router = router
        self._logits = logits
        self._product = platform.experts(gate_up, down, activation)
        self._group = group
        self._is_tree = down.num_leaves > 0
        self.expert_bytes = gate_up.expert_bytes + down.expert_bytes
        """Bytes of the weights of one expert, as they are stored."""
        self._shared = shared
        self._scales_inputs = scales_inputs
        self._expert_scales = None if expert_scales is None else expert_scales.float()
        self._norm = norm
        self._normed: NormedRoutes | None = None
        if isinstance(norm, RMSNorm) and router_weight is not None:
            self._normed = _normed_routes(platform, norm, router_weight, router)
        self._sum: ExpertProduct = self._sum_apart
        if shared is not None and group.size == 1 and not scales_inputs and not self._is_tree:
            self._sum = shared.joined_with(gate_up, down, activation, self._sum_apart)

    def __call__(self, x: torch.Tensor, routed_by: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H] → [T, H]. The router reads `routed_by` [T, H]; None: x."""
        logits = self._logits(x if routed_by is None else routed_by)
        return self._routed(x, self._platform.route(logits, self._router))

    def behind(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The experts of the norm of residual += x, [T, H] → [T, H]."""
        normed = None if self._normed is None else self._normed(x, residual)
        if normed is not None:
            return self._routed(*normed)
        assert self._norm is not None
        return self(cast(torch.Tensor, self._norm.add(x, residual)))

    def _routed(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        if self._expert_scales is not None:
            scales = self._expert_scales[routes.experts.long()]
            routes = Routes(routes.experts, routes.weights * scales)
        return self._sum(x, routes)

    def _sum_apart(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        own = self._product(*self._scaled(x, routes))
        out = self._group.tree_sum(own, x.dtype) if self._is_tree else self._group.sum(own)
        return out if self._shared is None else self._shared.added_to(out, x)

    def _scaled(self, x: torch.Tensor, routes: Routes) -> tuple[torch.Tensor, Routes]:
        """Inputs of experts, and the routes by which their outputs are added."""
        if not self._scales_inputs:
            return x, routes
        # A token has one expert.
        scaled = x * routes.weights.to(x.dtype)
        return scaled, Routes(routes.experts, torch.ones_like(routes.weights))


def _normed_routes(
    platform: Platform, norm: RMSNorm, weight: torch.Tensor, router: Router
) -> NormedRoutes | None:
    """Norm and routes in one launch; None: the platform has none such."""
    if not isinstance(platform, NormingPlatform):
        return None
    return platform.normed_routes(norm.weight, norm.eps, weight, router)


class ExpertsBesideMlp:
    """Adds the experts that read the residual stream to what an MLP makes of it. Source: Gemma
    4."""

    def __init__(
        self,
        experts: Experts,
        router_norm: PlainNorm,
        dense_norm: PlainNorm,
        input_norm: PlainNorm,
        norm: PlainNorm,
    ) -> None:
        """Norms of what the router reads, of what the MLP makes, and of what the experts read and
        make."""
        self.experts = experts
        self._router_norm = router_norm
        self._dense_norm = dense_norm
        self._input_norm = input_norm
        self._norm = norm

    def __call__(self, dense: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Output of the MLP, and the residual stream that it read, [T, H] → [T, H]"""
        made = self.experts(self._input_norm(residual), self._router_norm(residual))
        return self._dense_norm(dense) + self._norm(made)
