"""Cases of mixtures of experts: routes by each kind of router, and products with chosen experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..layers.linear.dense import DenseLinear
from ..layers.routing import ELSEWHERE, ExpertStack, Router, Routes, Scoring
from ..platforms import specification
from ..weights.model_config import CLAMPED_SWIGLU
from .case import ALLOWED, NUM_ITEMS, Case
from .subject import Subject, rows_of

NUM_EXPERTS = 24
NUM_CHOSEN = 5
WEIGHTS_ALLOWED = ALLOWED["float32"]
"""Largest error of routes, which are in float32 whatever the logits are."""
SIZES = (83, 131)
"""Hidden and intermediate size, before they are rounded up to what the platform serves."""


def expert_cases(subject: Subject) -> Iterator[Case]:
    if not subject.flags.experts:
        return
    for name, router in _routers(subject).items():
        logits = subject.randn(NUM_ITEMS, NUM_EXPERTS, scale=2.0)
        yield _routing(subject, name, logits, router)
    # Few values, so that most experts have equals.
    ties = subject.integers(3, NUM_ITEMS, NUM_EXPERTS).to(subject.dtype)
    yield _routing(subject, "of_equals", ties, Router(num_chosen=NUM_CHOSEN))
    for name, routes in _routes(subject).items():
        yield _product(subject, name, routes)
    if subject.flags.expert_parallel:
        yield _routing_of_share(subject)
        is_own = subject.integers(2, NUM_ITEMS, NUM_CHOSEN) > 0
        any_routes = _routes(subject)["any"]
        of_share = Routes(any_routes.experts.masked_fill(~is_own, ELSEWHERE), any_routes.weights)
        yield _product(subject, "share", of_share, is_share=True)
    if subject.flags.expert_biases:
        bias = subject.randn(NUM_EXPERTS)
        router = Router(num_chosen=NUM_CHOSEN, is_normalized=True, bias=bias)
        logits = subject.randn(NUM_ITEMS, NUM_EXPERTS, scale=2.0)
        yield _routing(subject, "biased", logits, router)
        yield _product(subject, "biased", _routes(subject)["any"], has_biases=True)


def _routers(subject: Subject) -> dict[str, Router]:
    correction = subject.randn(NUM_EXPERTS, scale=0.1).float()
    chosen: dict[str, Any] = {"num_chosen": NUM_CHOSEN}
    return {
        "softmax": Router(**chosen),
        "normalized": Router(**chosen, is_normalized=True, scale=2.5),
        "sigmoid": Router(
            **chosen, scoring=Scoring.SIGMOID, is_normalized=True, correction=correction
        ),
        "groups": Router(
            **chosen,
            scoring=Scoring.SIGMOID,
            correction=correction,
            num_groups=6,
            num_chosen_groups=2,
        ),
    }


def _routing(subject: Subject, name: str, logits: Tensor, router: Router) -> Case:
    platform = subject.platform()
    on_device = router
    if router.correction is not None:
        on_device = replace(router, correction=router.correction.to(platform.device))
    if router.bias is not None:
        on_device = replace(router, bias=router.bias.to(platform.device))
    return Case(
        operation=f"route_{name}",
        shapes=f"{NUM_ITEMS}x{NUM_EXPERTS}, {NUM_CHOSEN} chosen",
        run=lambda items: _weights(platform.route(rows_of(logits, items, platform), on_device)),
        expected=_weights(specification.route(logits, router)),
        allowed=WEIGHTS_ALLOWED,
    )


def _routing_of_share(subject: Subject) -> Case:
    """Routes of a rank that has the experts in the middle: those of others have no weight."""
    logits = subject.randn(NUM_ITEMS, NUM_EXPERTS, scale=2.0)
    everywhere = Router(num_chosen=NUM_CHOSEN)
    own = range(8, 16)
    platform = subject.platform()

    def run(items: list[int]) -> list[Tensor]:
        router = replace(everywhere, own=own)
        return _of_share(platform.route(rows_of(logits, items, platform), router))

    whole = specification.route(logits, everywhere)
    is_own = (whole.experts >= own.start) & (whole.experts < own.stop)
    local = (whole.experts - own.start).masked_fill(~is_own, ELSEWHERE)
    return Case(
        operation="route_share",
        shapes=f"{NUM_ITEMS}x{NUM_EXPERTS}, {NUM_CHOSEN} chosen",
        run=run,
        expected=_of_share(Routes(local, whole.weights)),
        allowed=WEIGHTS_ALLOWED,
    )


def _of_share(routes: Routes) -> list[Tensor]:
    """Experts and weights of each token, in routing order."""
    return list(torch.cat([routes.experts.cpu().float(), routes.weights.cpu().float()], dim=1))


def _weights(routes: Routes) -> list[Tensor]:
    """The weight of each expert [E] by token, and the place of each in routing order [E]."""
    experts = routes.experts.cpu().long()
    weights = torch.zeros(len(experts), NUM_EXPERTS).scatter(1, experts, routes.weights.cpu())
    ranks = torch.arange(1, experts.shape[1] + 1).expand(experts.shape).float()
    places = torch.zeros(len(experts), NUM_EXPERTS).scatter(1, experts, ranks)
    return list(torch.cat([weights, places], dim=1))


def _routes(subject: Subject) -> dict[str, Routes]:
    """Routes to random experts, and routes where one expert gets all tokens."""
    weights = subject.randn(NUM_ITEMS, NUM_CHOSEN).float().softmax(1)
    orders = torch.stack([subject.permutation(NUM_EXPERTS) for _ in range(NUM_ITEMS)])
    few = torch.stack([subject.permutation(NUM_CHOSEN) for _ in range(NUM_ITEMS)])
    return {
        "any": Routes(orders[:, :NUM_CHOSEN].int(), weights),
        "few": Routes(few.int(), weights),
    }


def _product(
    subject: Subject,
    name: str,
    routes: Routes,
    *,
    has_biases: bool = False,
    is_share: bool = False,
) -> Case:
    """Case of a product of experts. With biases, the gate is the clamped SwiGLU. For a share of the
    experts, routes give others the number `ELSEWHERE`."""
    hidden, inner = map(subject.size, SIZES)
    platform = subject.platform(hidden=hidden)
    x = subject.randn(NUM_ITEMS, hidden)
    gate_up = subject.randn(NUM_EXPERTS, 2 * inner, hidden, scale=hidden**-0.5)
    down = subject.randn(NUM_EXPERTS, hidden, inner, scale=inner**-0.5)
    activation = CLAMPED_SWIGLU if has_biases else "silu"
    biases = None
    stacks = [_stack(gate_up, platform), _stack(down, platform)]
    if has_biases:
        biases = subject.randn(NUM_EXPERTS, 2 * inner), subject.randn(NUM_EXPERTS, hidden)
        stacks = [
            replace(stack, bias=bias.to(platform.device))
            for stack, bias in zip(stacks, biases, strict=True)
        ]
    product = platform.experts(*(replace(stack, is_share=is_share) for stack in stacks), activation)
    here = Routes(
        routes.experts.clamp(0), routes.weights.masked_fill(routes.experts == ELSEWHERE, 0)
    )

    def run(items: list[int]) -> list[Tensor]:
        experts = rows_of(routes.experts, items, platform)
        own = Routes(experts, rows_of(routes.weights, items, platform))
        return list(product(rows_of(x, items, platform), own))

    return Case(
        operation=f"experts_{name}",
        shapes=f"{NUM_ITEMS}x{hidden}, {NUM_EXPERTS} of {inner}",
        run=run,
        expected=list(specification.experts(x, here, gate_up, down, activation, biases)),
        allowed=subject.allowed,
    )


def _stack(weight: Tensor, platform: Any) -> ExpertStack:
    """weight [E, N, K] on the platform's device"""
    return ExpertStack(DenseLinear(weight.flatten(0, 1).to(platform.device)), len(weight))
