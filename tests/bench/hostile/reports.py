"""Reports of runs that were not made."""

from __future__ import annotations

from headwater.bench.hostile.table import Figures, Report, Row

ALONE = Figures(p50_ms=50.0, p99_ms=100.0, ratio=1.1)


def report_with(*rows: Row) -> Report:
    return Report(
        requests_per_minute=2,
        seconds=6.0,
        executor="single",
        date="2026-11-29",
        commit="c0ffee1",
        first_token_alone=ALONE,
        structured_alone=ALONE,
        rows=list(rows),
    )


def row(body: str, *, first_token: float, structured: float, num_faults: int = 0) -> Row:
    """A row with these ratios."""
    return Row(
        body=body,
        answers={"400": 2},
        first_token=Figures(p50_ms=50.0, p99_ms=100 * first_token, ratio=first_token),
        structured=Figures(p50_ms=50.0, p99_ms=100 * structured, ratio=structured),
        settled_seconds=0.5,
        num_faults=num_faults,
        faults=["HTTP 503"] * num_faults,
    )
