"""How benchmarks of one piece show what they measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import pytest

from headwater.bench.figures import seconds_of, show_figures, show_rows


@dataclass(frozen=True, slots=True)
class Measured:
    workload: str
    num_rows: int
    num_tenants: int
    engine_us: float
    num_bytes: int


ROWS = [
    Measured("steady decode, drafts looked for in vain", 16, 1, 110.5, 83_927_040),
    Measured("128 in, 64 out", 256, 1, 110.5, 83_927_041),
]


def test_no_figure_of_a_table_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    show_rows(ROWS, "steps", as_json=False)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert [printed.count(each) for each in ("110.5", "83,927,040", "83,927,041")] == [2, 1, 1]
    assert "num tenants 1" in printed, "what all rows have alike is said once"


def test_json_holds_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(ROWS, "steps", as_json=True)
    assert json.loads(capsys.readouterr().out) == [asdict(row) for row in ROWS]
    show_figures({"p50_ms": {"alone": 1.5}, "missing": None}, "a gateway", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"p50_ms": {"alone": 1.5}, "missing": None}


def test_one_measurement_is_a_line_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    show_figures(
        {"p50_ms": {"alone": 1.5}, "missing": None, "tokens": 12345}, "a gateway", as_json=False
    )
    printed = capsys.readouterr().out
    assert [word in printed for word in ("p50 ms", "alone 1.5", "–", "12,345")] == [True] * 4


def test_every_call_is_timed() -> None:
    calls: list[int] = []
    assert len(seconds_of(lambda: calls.append(1), 3)) == 3
    assert len(calls) == 3
