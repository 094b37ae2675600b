"""The site of `make docs`: every page but records has a place in it, and nothing of it comes from
elsewhere."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.docs.pages import PAGES, ROOT

SITE = ROOT / "mkdocs.yml"
AT_THE_TOP = {"README.md": "index.md"}
IN_DOCS = {"README.md": "tasks.md"}
"""Names on the site that are others."""


def places(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [place for child in children for place in places(child)]


def test_every_page_has_one_place_in_the_site_or_is_excluded() -> None:
    site = yaml.safe_load(SITE.read_text())
    nav = places(site["nav"])
    excluded = tuple(site["exclude_docs"].split())
    names = {str(path.relative_to(ROOT / "docs")) for path in PAGES if path.parent != ROOT}
    of_docs = {IN_DOCS.get(name, name) for name in names if not name.startswith(excluded)}
    at_the_top = {AT_THE_TOP.get(path.name, path.name) for path in PAGES if path.parent == ROOT}
    assert sorted(nav) == sorted(of_docs | at_the_top)


def test_the_site_asks_nobody_for_fonts() -> None:
    text = SITE.read_text()
    assert yaml.safe_load(text)["theme"]["font"] is False
    assert re.findall(r"https?://", text) == []
