"""The pictures of the console on docs/console.md: every view that the page has, at three widths."""

from __future__ import annotations

import re
from pathlib import Path

from tests.browser.screenshots import IMAGES, SIZES, VIEWS

ROOT = Path(__file__).parents[2]


def test_each_view_of_the_console_is_shown_at_three_widths() -> None:
    app = (ROOT / "gateway/console/app.js").read_text()
    assert set(re.findall(r"^  (\w+): new \w+View\(\)", app, re.M)) == set(VIEWS)
    pictures = {f"{view}-{width}.webp" for view in VIEWS for width, _ in SIZES}
    shown = re.findall(r"\(images/console/([^)]+)\)", (ROOT / "docs/console.md").read_text())
    assert len(pictures) == 3 * len(VIEWS)
    assert pictures <= {path.name for path in IMAGES.iterdir()}
    assert pictures <= set(shown)
