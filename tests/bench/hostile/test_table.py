"""From the neighbour's latencies to rows and ratios."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from headwater.bench.hostile.neighbour import Latencies
from headwater.bench.hostile.table import (
    Figures,
    Report,
    Row,
    alone_figures,
    columns_and_lines,
    figures,
    report_of,
)
from headwater.bench.hostile.trial import Beside, Measured
from tests.bench.hostile.reports import report_with

ALONE = Latencies([0.1] * 50, [0.2] * 20)
BESIDE = Beside(Counter(), ALONE, 0.1)
HUNDREDTHS = [each / 100 for each in range(1, 101)]


def row_beside(
    ttft: list[float],
    structured: list[float],
    *faults: str,
    settled_seconds: float | None = 1.0,
) -> Row:
    latencies = Latencies(ttft, structured, list(faults))
    beside = Beside(Counter({"429": 5, "200": 2}), latencies, settled_seconds)
    [row] = reported(Measured([ALONE], {"keys": [beside]})).rows
    return row


def reported(measured: Measured) -> Report:
    return report_of(
        measured,
        requests_per_minute=2,
        seconds=6.0,
        executor="single",
        commit="c0ffee1",
        cores="2 cores",
    )


def test_a_ratio_is_that_of_the_99th_percentiles() -> None:
    alone = Figures(p50_ms=50.0, p99_ms=100.0, ratio=1.0)
    assert figures([HUNDREDTHS], alone) == Figures(p50_ms=505.0, p99_ms=990.1, ratio=9.9)


def test_alone_counts_the_middle_stretch_and_the_ratio_of_the_worst_one_to_it() -> None:
    stretches = [[0.1] * 9, [0.2] * 9, [0.5] * 9]
    assert alone_figures(stretches) == Figures(p50_ms=200.0, p99_ms=200.0, ratio=2.5)


@pytest.mark.parametrize(
    ("row", "is_within"),
    [
        (row_beside([0.13] * 9, [0.4] * 9), True),
        (row_beside([0.14] * 9, [0.2] * 9), False),
        (row_beside([0.1] * 9, [0.41] * 9), False),
        (row_beside([0.1] * 9, [0.2] * 9, "HTTP 503: …"), False),
        (row_beside([0.1] * 9, [0.2] * 9, settled_seconds=None), False),
    ],
    ids=["at both goals", "streams", "structured answers", "a fault", "never settled"],
)
def test_goals_are_1_3_for_streams_2_for_structured_answers_and_no_fault(
    row: Row, is_within: bool
) -> None:
    assert row.is_within_goals is is_within


def test_a_row_keeps_what_the_hostile_tenant_got_and_the_first_faults() -> None:
    row = row_beside([0.1], [0.2], "a", "b", "c", "d")
    assert list(row.answers.items()) == [("429", 5), ("200", 2)]
    assert (row.num_faults, row.faults) == (4, ["a", "b", "c"])


def test_a_body_that_is_measured_again_has_the_medians_of_its_stretches() -> None:
    stretches = [
        Beside(Counter({"429": 5}), Latencies([ttft], [0.2]), settled)
        for ttft, settled in ((0.1, 0.5), (0.2, 2.5), (0.9, 1.5))
    ]
    [row] = reported(Measured([ALONE], {"keys": stretches})).rows
    assert row.first_token == Figures(p50_ms=200.0, p99_ms=200.0, ratio=2.0)
    assert (row.answers, row.settled_seconds) == ({"429": 15}, 2.5)


@pytest.mark.parametrize(
    ("row", "is_close"),
    [
        (row_beside([0.1] * 9, [0.2] * 9), False),
        (row_beside([0.5] * 9, [0.2] * 9), True),
        (row_beside([0.5] * 9, [0.2] * 9, "HTTP 503: …"), False),
        (row_beside([0.5] * 9, [0.2] * 9, settled_seconds=None), False),
    ],
    ids=["within goals", "slow", "a fault", "never settled"],
)
def test_only_what_misses_a_goal_by_times_alone_is_measured_again(row: Row, is_close: bool) -> None:
    assert row.is_close is is_close


def test_a_printed_line_has_times_ratios_and_whether_goals_are_met() -> None:
    columns, lines = columns_and_lines(report_with(row_beside([0.2] * 9, [0.2] * 9)))
    assert len(columns) == len(lines[0]) == len(lines[1])
    assert lines[1] == [
        "keys",
        "5 × 429  2 × 200",
        "200 / 200",
        2.0,
        "200 / 200",
        1.0,
        "1.0 s",
        "missed, 0 failed",
    ]


def test_a_report_names_what_was_measured_and_when() -> None:
    report = reported(Measured([ALONE, ALONE]))
    assert (report.requests_per_minute, report.executor, report.commit) == (2, "single", "c0ffee1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report.date)
    assert report.first_token_alone == Figures(p50_ms=100.0, p99_ms=100.0, ratio=1.0)
    assert report.structured_alone == Figures(p50_ms=200.0, p99_ms=200.0, ratio=1.0)


def test_stretches_of_groups_count_together_in_the_order_of_the_list() -> None:
    measured = Measured([ALONE], {"long-prompt": [BESIDE]})
    measured.add(Measured([ALONE], {"keys": [BESIDE], "long-prompt": [BESIDE]}))
    assert len(measured.alone) == len(measured.beside["long-prompt"]) == 2
    assert [row.body for row in reported(measured).rows] == ["keys", "long-prompt"]


def test_rows_of_an_earlier_run_stay_with_its_commit_until_they_are_measured_again() -> None:
    earlier = reported(Measured([ALONE], {"keys": [BESIDE], "long-prompt": [BESIDE]}))
    later = replace(reported(Measured([ALONE], {"keys": [BESIDE]})), commit="beefed1")
    merged = later.with_rows_of(earlier)
    assert [row.body for row in merged.rows] == ["keys", "long-prompt"]
    assert merged.earlier == {"long-prompt": "c0ffee1"}
    third = replace(later, commit="decade1").with_rows_of(merged)
    assert (third.commit, third.earlier) == ("decade1", {"long-prompt": "c0ffee1"})
    assert not earlier.with_rows_of(merged).earlier
