"""Successive halving (Jamieson, Talwalkar 2016): many candidates on a small budget, the better ones
on a larger one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

CandidateT = TypeVar("CandidateT")
Report = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Generic[CandidateT]):
    """One measurement of a candidate."""

    candidate: CandidateT
    rung: int
    budget: int
    score: float
    """Score of the trial; more is better."""
    report: Report


def successive_halving(
    candidates: Sequence[CandidateT],
    measure: Callable[[CandidateT, int], Report],
    score: Callable[[Report], float],
    *,
    budget: int,
    eta: int,
) -> list[Trial[CandidateT]]:
    """Every trial in order; the best of the last rung is the winner. Each rung keeps one in `eta`
    and gives those `eta` times the budget; the last one measures at most `eta` candidates against
    one another."""
    trials: list[Trial[CandidateT]] = []
    rung = 0
    alive = list(candidates)
    while True:
        tried = []
        for candidate in alive:
            report = measure(candidate, budget)
            tried.append(
                Trial(
                    candidate=candidate,
                    rung=rung,
                    budget=budget,
                    score=score(report),
                    report=report,
                )
            )
        trials += tried
        if len(alive) <= eta:
            return trials
        ranked = sorted(tried, key=lambda trial: trial.score, reverse=True)
        alive = [trial.candidate for trial in ranked[: -(-len(ranked) // eta)]]
        rung = rung + 1
        budget = budget * eta


def winner(trials: Sequence[Trial[CandidateT]]) -> Trial[CandidateT]:
    last = max(trial.rung for trial in trials)
    return max((trial for trial in trials if trial.rung == last), key=lambda trial: trial.score)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(cost, gain) points that no other point beats in both, by cost."""
    front: list[tuple[float, float]] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front
