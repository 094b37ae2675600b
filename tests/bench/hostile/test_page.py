"""The table of docs/costly_requests.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.bench.hostile import page
from headwater.bench.hostile.bodies import CONTROL_NAMES, NAMES
from headwater.bench.hostile.page import PAGE, NoPlace, read_reports, table, with_table, write
from tests.bench.hostile.reports import report_with, row

SMALL = report_with(row("keys", first_token=1.05, structured=1.5))
GENEROUS = report_with(row("keys", first_token=1.31, structured=2.5, num_faults=3))
CONTROL = report_with(row("control-posts", first_token=1.4, structured=2.1))


NEW_BODIES = ("ollama-options", "ollama-history", "ollama-schemas", "ollama-inputs")
"""Bodies that joined the list after the last measurement of the whole table."""


def test_the_page_holds_what_was_measured_of_each_body_of_the_list() -> None:
    reports = read_reports()
    text = PAGE.read_text()
    assert with_table(text, reports) == text
    for report in reports.values():
        measured = [each.body for each in report.rows]
        listed = tuple(name for name in NAMES if name in measured or name not in NEW_BODIES)
        assert tuple(name for name in measured if name not in CONTROL_NAMES) == listed
        assert tuple(measured) in (listed, CONTROL_NAMES + listed)


def test_a_line_has_two_cells_for_each_key_and_what_misses_its_goal_is_bold() -> None:
    written = table({"small": SMALL, "generous": GENEROUS})
    assert (
        "| `keys` | an object with 250,000 names | 1.05 | 1.50 | **1.31** | **2.50**, 3 failed |"
    ) in written
    assert "|  | nothing | 1.10, 100 ms | 1.10, 100 ms | 1.10," in written
    assert "| `escapes` |" not in written
    assert ", `escapes`, " in written.partition("Not measured yet: ")[2]
    assert "- The small key has 2 requests a minute: 2026-11-29, c0ffee1, executor" in written


def test_a_control_has_no_goals() -> None:
    what = "harmless: completions of one token, on 12 connections"
    line = f"| `control-posts` | {what} | 1.40 | 2.10 |"
    assert line in table({"small": CONTROL})


def test_what_was_measured_replaces_its_rows_and_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path / "hostile_bodies.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "costly_requests.md")
    page.PAGE.write_text(f"before\n{page.BEGIN}old\n{page.END}after\n")
    write({"small": SMALL})
    write({"generous": GENEROUS})
    write({"small": CONTROL})
    reports = {"small": CONTROL.with_rows_of(SMALL), "generous": GENEROUS}
    assert read_reports() == reports
    written = page.PAGE.read_text()
    assert written == f"before\n{page.BEGIN}\n{table(reports)}\n{page.END}after\n"
    assert "\n- Measured with the small key at c0ffee1: `keys`.\n" in written


def test_notes_have_short_lines_as_other_prose() -> None:
    earlier = report_with(*(row(name, first_token=1.0, structured=1.0) for name in NAMES))
    written = table({"small": CONTROL.with_rows_of(earlier)})
    assert all(len(line) <= 120 for line in written.splitlines() if not line.startswith("|"))


def test_a_page_without_a_place_for_the_table_is_an_error() -> None:
    with pytest.raises(NoPlace, match=r"costly_requests\.md lacks the line"):
        with_table("nothing", {})
