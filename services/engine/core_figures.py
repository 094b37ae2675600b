"""The newest figures of a core's ranks and of its model's experts."""

from __future__ import annotations

from headwater.engine_core.expert_figures import ExpertFigures
from headwater.engine_core.parallel.rank_facts import RankFigures

from .messages import OfFigures, Ranks


class CoreFigures:
    def __init__(self) -> None:
        self.ranks: list[RankFigures] = []
        """In the order of the ranks; empty: there are none."""
        self.experts: ExpertFigures | None = None
        """None: the model has no experts, or none has computed."""

    def note(self, report: OfFigures) -> None:
        if isinstance(report, Ranks):
            self.ranks = report.figures
        else:
            self.experts = report.figures
