from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.bench import combinations
from headwater.bench.combinations import cells_seen, note, page, read_results


def line(
    name: str, place: tuple[int, int], seen: str, outcome: str = "passed", phase: str = "call"
) -> dict[str, Any]:
    cell = {"name": name, "place": list(place)} | ({"seen": seen} if outcome == "passed" else {})
    return {
        "id": name,
        "phase": phase,
        "outcome": outcome,
        "error": seen,
        "properties": {"cell": cell},
    }


LINES: list[dict[str, Any]] = [
    {"collected": ["a", "b"]},
    line("a × a", (0, 0), "same tokens"),
    line("a × a", (0, 0), "same tokens", phase="teardown"),
    line("a × b", (0, 1), "refused: `b`"),
    line("b × b", (1, 1), "other tokens", outcome="failed"),
]


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(combinations, "RESULTS", tmp_path / "combinations.json")
    monkeypatch.setattr(combinations, "PAGE", tmp_path / "combinations.md")
    return tmp_path


def test_a_cell_shows_its_own_words_or_how_it_failed() -> None:
    assert {name: cell["seen"] for name, cell in cells_seen(LINES).items()} == {
        "a × a": "same tokens",
        "a × b": "refused: `b`",
        "b × b": "failed: other tokens",
    }


def test_the_page_names_what_each_capability_is_refused_with_or_failed_with(docs: Path) -> None:
    note(cells_seen(LINES), "cpu", "c0ffee1", forget=True)
    note(cells_seen(LINES[:2]), "gpu", "c0ffee2", forget=False)
    written = (docs / "combinations.md").read_text()
    assert written == page(read_results())
    titles, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in written.splitlines()
        if line.startswith("|")
    ]
    table = [dict(zip(titles, row, strict=True)) for row in rows]
    assert table == [
        {"capability": "**a**", "refused on a CPU with": "b", "failed on a CPU with": ""},
        {"capability": "**b**", "refused on a CPU with": "a", "failed on a CPU with": "b"},
    ]


def test_rows_do_not_repeat_a_capability_that_is_refused_with_all_others(docs: Path) -> None:
    refused = [line(f"{each} × d", (i, 3), "refused: `d`") for i, each in enumerate("abcd")]
    places = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    equal = [line(f"{'abc'[i]} × {'abc'[j]}", (i, j), "same tokens") for i, j in places]
    note(cells_seen([*equal, *refused]), "cpu", "c0ffee1", forget=True)
    rows = (docs / "combinations.md").read_text().splitlines()[-4:]
    assert [row.split("|")[2].strip() for row in rows] == ["", "", "", "all"]


def test_a_whole_run_forgets_cells_that_are_no_more_and_others_add_to_what_is_there(
    docs: Path,
) -> None:
    note(cells_seen(LINES), "cpu", "c0ffee1", forget=True)
    note(cells_seen([line("a × a", (0, 0), "same bits")]), "gpu", "c0ffee2", forget=False)
    assert set(read_results()) == {"a × a", "a × b", "b × b"}
    note(cells_seen(LINES[:3]), "cpu", "c0ffee1", forget=True)
    assert {name: set(cell["platforms"]) for name, cell in read_results().items()} == {
        "a × a": {"cpu", "gpu"}
    }
