"""The page about alerts is that of the rules."""

from __future__ import annotations

from tests.docs.alerts import PAGE, page


def test_the_page_of_alerts_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.docs.alerts`"


def test_every_alert_says_what_to_do() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    assert all(len(row.split(" | ")[-1]) > 20 for row in rows)
    assert "{{" not in page()
