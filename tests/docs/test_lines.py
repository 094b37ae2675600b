"""Prose has short lines, which a terminal shows whole and a diff compares, and paragraphs that one
can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import (
    PAGES,
    ROOT,
    long_lines_of,
    long_paragraphs_of,
    name_of,
    num_words_of,
)

LIMIT = 120
"""Characters a line."""
PARAGRAPH = 800
"""Characters a paragraph or an item of a list."""
WORDS = 1500
"""Words of prose of a page that is read from its beginning to its end."""
REFERENCE = {"api.md", "models.md", "fields.md", "configuration.md", "combinations.md"}
"""Pages in which one looks something up."""
RECORDS = {"experiments.md", "long_tests.md"}
"""Pages that the site leaves out."""
GENERATED = {
    *(
        ROOT / "docs" / name
        for name in (
            "alerts.md",
            "benchmarks.md",
            "combinations.md",
            "configuration.md",
            "fields.md",
        )
    ),
    *(ROOT / "docs" / "benchmarks").glob("*.md"),
}
"""Pages that programs write: `headwater bench report`, `headwater bench combinations`,
`tests.docs.alerts`, `tests.docs.configuration`, `tests.docs.fields`."""
WRITTEN = [page for page in PAGES if page not in GENERATED]


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_prose_is_written_in_short_lines(page: Path) -> None:
    assert long_lines_of(page, LIMIT) == []


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_no_paragraph_is_so_long_that_nobody_reads_it(page: Path) -> None:
    assert long_paragraphs_of(page, PARAGRAPH) == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in REFERENCE | RECORDS], ids=name_of
)
def test_a_page_that_is_read_is_no_longer_than_it_can_be_read(page: Path) -> None:
    assert num_words_of(page) <= WORDS


def test_long_prose_is_found_and_what_cannot_be_broken_is_let_be(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    long = "word " * 30
    code = f"`{long}`"
    page.write_text(
        f"{long}\n- {long}\n\n| a | {long} "
        f"|\n|---|---|\n\n```sh\n{long}\n```\n{code}\n{code}.\nsee {code}\n"
        f"<!-- {long} -->\n# {long}\n{'x' * 130}\n"
    )
    assert long_lines_of(page, LIMIT) == [1, 2, 12, 14]


def test_long_paragraphs_and_items_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    line = "word " * 20 + "\n"
    page.write_text(
        f"{line}\n{line}{line}\n- {line}- {line}  {line}\n| a |\n|---|\n| {line * 3} "
        f"|\n\n```sh\n{line * 3}```\n"
    )
    assert long_paragraphs_of(page, 150) == ["word " * 12, ("- " + "word " * 12)[:60]]
