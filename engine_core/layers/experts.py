"""A mixture of experts in the place of an MLP. Source: Shazeer et al., "Outrageously large neural
networks", 2017."""

from __future__ import annotations

import torch

from .group import Group
from .linear.linear import Linear, Product
from .mlp import Mlp
from .platform import ExpertPlatform, Platform
from .routing import ExpertStack, Router, Routes


class SharedExpert:
    """An expert that every token has, some of them times the sigmoid of a product of their own."""

    def __init__(self, platform: Platform, mlp: Mlp, gate: Linear | None) -> None:
        """gate [1, H]; None: it is added as it is."""
        self._platform = platform
        self._mlp = mlp
        self._gate = None if gate is None else platform.linear(gate)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        out = self._mlp(x)
        if self._gate is None:
            return out
        return self._platform.activation(self._gate(x), "sigmoid") * out


class Experts:
    """The sum of the experts that a router chooses for a token, each times its weight, and of the
    shared expert where there is one. Ranks have a share of every expert, or some whole ones."""

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
    ) -> None:
        """`logits` makes the router's, [T, E] of x [T, H]. gate_up of 2 I outputs, gates first, and
        down of H; activation as in `Platform.gate`. `scales_inputs`: see `ExpertsConfig`."""
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        routes = self._platform.route(self._logits(x), self._router)
        own = self._product(*self._scaled(x, routes))
        out = self._group.tree_sum(own, x.dtype) if self._is_tree else self._group.sum(own)
        return out if self._shared is None else out + self._shared(x)

    def _scaled(self, x: torch.Tensor, routes: Routes) -> tuple[torch.Tensor, Routes]:
        """What experts read, and the routes by which their outputs are added."""
        if not self._scales_inputs:
            return x, routes
        # A token has one expert.
        scaled = x * routes.weights.to(x.dtype)
        return scaled, Routes(routes.experts, torch.ones_like(routes.weights))
