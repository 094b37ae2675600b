"""Prose is written in short lines, which a terminal shows whole and a diff compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, long_lines_of, name_of

LIMIT = 120
"""Characters a line."""
GENERATED = {
    *(ROOT / "docs" / name for name in ("benchmarks.md", "combinations.md", "configuration.md")),
    *(ROOT / "docs" / "benchmarks").glob("*.md"),
}
"""Pages that programs write: `headwater bench report`, `headwater bench combinations`, `tests.docs.configuration`."""


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED], ids=name_of)
def test_prose_is_written_in_short_lines(page: Path) -> None:
    assert long_lines_of(page, LIMIT) == []


def test_long_prose_is_found_and_what_cannot_be_broken_is_let_be(tmp_path: Path) -> None:
    page, long = tmp_path / "page.md", "word " * 30
    code = f"`{long}`"
    page.write_text(
        f"{long}\n- {long}\n\n| a | {long} |\n|---|---|\n\n```sh\n{long}\n```\n{code}\n{code}.\nsee {code}\n"
        f"<!-- {long} -->\n# {long}\n{'x' * 130}\n"
    )
    assert long_lines_of(page, LIMIT) == [1, 2, 12, 14]
