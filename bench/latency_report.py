"""Outcomes of many requests as one table and one JSON object: rates, percentiles, goodput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from .sse_client import Outcome

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Latency objectives; a request that keeps all of them counts towards goodput. None: no
    objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def kept_by(self, outcome: Outcome) -> bool:
        pairs = (
            (self.ttft_ms, outcome.ttft),
            (self.tpot_ms, outcome.tpot),
            (self.e2e_ms, outcome.e2e),
        )
        return all(limit is None or seconds * 1000 <= limit for limit, seconds in pairs)


METRICS: dict[str, Callable[[Outcome], list[float]]] = {
    "ttft": lambda outcome: [outcome.ttft],
    "tpot": lambda outcome: [outcome.tpot],
    "itl": lambda outcome: outcome.gaps,
    "e2e": lambda outcome: [outcome.e2e],
}


def summarize(
    outcomes: Sequence[Outcome], wall_seconds: float, objective: Objective
) -> dict[str, Any]:
    """Rates over the wall time and latencies in milliseconds, over the requests that did not
    fail."""
    good = [outcome for outcome in outcomes if not outcome.error]
    output_tokens = sum(outcome.completion_tokens for outcome in good)
    report: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:3],
        "wall_s": round(wall_seconds, 3),
        "requests_per_s": round(len(good) / wall_seconds, 2),
        "output_tokens_per_s": round(output_tokens / wall_seconds, 1),
        "prompt_tokens_per_s": round(
            sum(outcome.prompt_tokens for outcome in good) / wall_seconds, 1
        ),
        "cached_prompt_share": _share(
            [o.cached_tokens for o in good], [o.prompt_tokens for o in good]
        ),
        "goodput_requests_per_s": round(
            (num_kept := sum(map(objective.kept_by, good))) / wall_seconds, 2
        ),
        "goodput_share": round(num_kept / max(1, len(outcomes)), 4),
    }
    for name, values_of in METRICS.items():
        values = (
            np.array([value for outcome in good for value in values_of(outcome)] or [0.0]) * 1000
        )
        report[f"{name}_ms"] = {"mean": round(float(values.mean()), 3)} | {
            f"p{percentile}": round(float(np.percentile(values, percentile)), 3)
            for percentile in PERCENTILES
        }
    return report


def samples(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds of every request that did not fail, for plots."""
    good = [outcome for outcome in outcomes if not outcome.error]
    names = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end"}
    return {
        names[name]: [value for each in good for value in of(each)] for name, of in METRICS.items()
    }


def as_table(report: dict[str, Any], title: str) -> Table:
    table = Table(title=title)
    for column in ("metric", "value"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, value in report.items():
        shown = (
            "  ".join(f"{key} {figure:,.2f}" for key, figure in value.items())
            if isinstance(value, dict)
            else value
        )
        table.add_row(name, f"{shown:,}" if isinstance(shown, (int, float)) else str(shown))
    return table


def _share(part: list[int], whole: list[int]) -> float:
    return round(sum(part) / max(1, sum(whole)), 4)
