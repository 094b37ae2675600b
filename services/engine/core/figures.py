"""Newest figures of a core's ranks and of its model's experts, as the server has them."""

from __future__ import annotations

from typing import NamedTuple

from headwater.engine_core.expert_figures import ExpertFigures
from headwater.engine_core.parallel.rank_facts import RankFigures

from .messages import OfFigures, Ranks


class WeightsIdentity(NamedTuple):
    revision: str
    numerics_id: str


class CoreFigures:
    def __init__(self) -> None:
        self.weights: list[WeightsIdentity] = []
        """Weights that the core has computed with, in order."""
        self.ranks: list[RankFigures] = []
        """Figures by rank; empty: the core is one process."""
        self.experts: ExpertFigures | None = None
        """Figures of experts; None: the model has no experts, or none was reported so far."""

    def note(self, report: OfFigures) -> None:
        """Takes over a report of the core."""
        if isinstance(report, Ranks):
            self.ranks = report.figures
        else:
            self.experts = report.figures
