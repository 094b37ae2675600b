"""Mixtures of experts on a GPU: the router's choice and the products of chosen experts."""

from __future__ import annotations

from functools import partial

import torch

from headwater.kernels.experts.expert_product import expert_product, launch_all_tiles
from headwater.kernels.experts.route import Choice, route

from ..config import require
from ..layers.linear.dense import DenseLinear
from ..layers.routing import ExpertProduct, ExpertStack, Router, Routes, Scoring

GELUS = {"silu": False, "gelu_tanh": True}
"""Activations, and whether they are a GELU."""
ALLOWED_KIND = f"{DenseLinear.kind} on the platform cuda"


class CudaExperts:
    """The experts of a model's layers. Up to `early_rows` tokens kernels start while those before
    them end."""

    def __init__(self, early_rows: int) -> None:
        self._early_rows = early_rows
        self._known: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor, bool]] = {}
        """Weights of one layer by their shapes and their activation."""

    def route(self, logits: torch.Tensor, router: Router) -> Routes:
        """See `Platform.route`."""
        choice = Choice(
            num_chosen=router.num_chosen,
            is_sigmoid=router.scoring is Scoring.SIGMOID,
            is_normalized=router.is_normalized,
            scale=router.scale,
            num_groups=router.num_groups,
            num_chosen_groups=router.num_chosen_groups,
        )
        is_early = self._is_early(logits)
        return Routes(*route(logits, choice, router.correction, dependent=is_early))

    def product(self, gate_up: ExpertStack, down: ExpertStack, activation: str) -> ExpertProduct:
        """See `Platform.experts`. Raises `ConfigError` for weights of a kind other than dense."""
        for stack in (gate_up, down):
            is_dense = stack.kind == DenseLinear.kind
            require(is_dense, "kind of weights of experts", stack.kind, ALLOWED_KIND)
        weights = (gate_up.weight, down.weight, GELUS[activation])
        self._known[gate_up.weight.shape, down.weight.dtype, activation] = weights
        return partial(self._product, weights)

    def launch_all(self, num_chosen: int) -> None:
        """Once with all kernels of the products that were made, so that no step compiles them."""
        for gate_up, down, is_gelu in self._known.values():
            launch_all_tiles(
                gate_up, down, num_chosen, is_gelu=is_gelu, early_tokens=self._early_rows
            )

    def _product(
        self, weights: tuple[torch.Tensor, torch.Tensor, bool], x: torch.Tensor, routes: Routes
    ) -> torch.Tensor:
        gate_up, down, is_gelu = weights
        return expert_product(
            x,
            routes.experts,
            routes.weights,
            gate_up,
            down,
            is_gelu=is_gelu,
            dependent=self._is_early(x),
        )

    def _is_early(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= self._early_rows
