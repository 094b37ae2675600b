"""Links between pages lead somewhere: to files that are there, and to headings that these have."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.pages import PAGES, ROOT, anchors_of, links_of, name_of


def broken(page: Path) -> list[str]:
    found = []
    for link in links_of(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target)
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_to_a_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "README.md"
    assert "coming-from-vllm" in anchors_of(ROOT / "docs" / "api.md")
    assert "no-such-heading" not in anchors_of(page)
    lost = tmp_path / "lost.md"
    lost.write_text("[a](lost.md#b) [c](nowhere.md) `[d](code.md)` [e](https://example.org)\n")
    assert broken(lost) == ["lost.md#b", "nowhere.md"]
