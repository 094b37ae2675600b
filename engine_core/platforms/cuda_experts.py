"""Mixtures of experts on a GPU: the router's choice and the products of chosen experts."""

from __future__ import annotations

from functools import partial

import torch

from headwater.kernels.experts.expert_product import expert_product
from headwater.kernels.experts.route import Choice, route

from ..layers.routing import ExpertProduct, ExpertStack, Router, Routes, Scoring


def chosen_routes(logits: torch.Tensor, router: Router, *, early_rows: int) -> Routes:
    """The routes of tokens with logits [T, E]. Up to so many rows the choice starts while the
    kernel before it ends."""
    choice = Choice(
        num_chosen=router.num_chosen,
        is_sigmoid=router.scoring is Scoring.SIGMOID,
        is_normalized=router.is_normalized,
        scale=router.scale,
        num_groups=router.num_groups,
        num_chosen_groups=router.num_chosen_groups,
    )
    is_early = logits.shape[0] <= early_rows
    return Routes(*route(logits, choice, router.correction, dependent=is_early))


def dense_experts(
    gate_up: ExpertStack, down: ExpertStack, activation: str, *, early_rows: int
) -> ExpertProduct:
    """The product of experts whose matrices are in the model's dtype; activation silu or
    gelu_tanh."""
    assert activation in ("silu", "gelu_tanh")
    return partial(
        _product,
        gate_up=gate_up.weight,
        down=down.weight,
        is_gelu=activation == "gelu_tanh",
        early_rows=early_rows,
    )


def _product(
    x: torch.Tensor,
    routes: Routes,
    *,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    is_gelu: bool,
    early_rows: int,
) -> torch.Tensor:
    return expert_product(
        x,
        routes.experts,
        routes.weights,
        gate_up,
        down,
        is_gelu=is_gelu,
        dependent=x.shape[0] <= early_rows,
    )
