"""The candidates of `headwater bench tune`: combinations of engine settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import typer

from headwater.engine_core.queue_policies import POLICIES
from headwater.services.stack.profile import EngineProfile, Profile

from .program import check_choice


def grid(
    budgets: Sequence[int],
    seqs: Sequence[int],
    chunks: Sequence[int],
    policies: Sequence[str],
    replicas: Sequence[int],
) -> list[Profile]:
    """Combinations of settings that an engine accepts."""
    return [
        Profile(
            replicas=count,
            engine=EngineProfile(
                max_num_batched_tokens=budget,
                max_num_seqs=num_seqs,
                long_prefill_chunk=chunk,
                policy=policy,
            ),
        )
        for budget, num_seqs, chunk, policy, count in itertools.product(
            budgets, seqs, chunks, policies, replicas
        )
        if num_seqs <= budget and chunk < budget
    ]


def drawn(grid: list[Profile], count: int, rng: np.random.Generator) -> list[Profile]:
    if not grid:
        raise typer.BadParameter(
            "no combination is left: max_num_seqs and long_prefill_chunk stay within the budget"
        )
    if not 0 < count < len(grid):
        return grid
    return [grid[i] for i in sorted(rng.choice(len(grid), count, replace=False))]


def ints(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}; allowed: whole numbers with commas between them"
        ) from None


def policies_of(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        check_choice("policy", name, POLICIES)
    return names


def name_of(candidate: Profile) -> str:
    engine = candidate.engine
    return (
        f"{candidate.replicas}× budget {engine.max_num_batched_tokens} seqs {engine.max_num_seqs}"
        f" chunk {engine.long_prefill_chunk} {engine.policy}"
    )
