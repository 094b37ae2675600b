"""The site of `make docs` in a real Chromium, on a desk and on a phone, light and dark."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import Chromium
from tests.browser.install import AXE
from tests.docs.pages import ROOT

# CI has neither a browser nor the environment of the site; `make test-long` installs both.
pytestmark = pytest.mark.long
PYTHON = ROOT / os.environ.get("DOCS_VENV", ".venv-docs") / "bin" / "python"
SHOWN = (
    *("index", "tutorial", "tutorial_gpu", "console", "gpus", "python", "kubernetes"),
    *("architecture", "api", "glossary", "troubleshooting", "choosing"),
)
"""Pages with every kind of content: prose, tables, code of each language, drawings, pictures."""
BUILD_SECONDS = 20.0


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


def _child_seconds() -> float:
    """Seconds of a core that ended children have used: others on the machine do not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [str(PYTHON), "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    before = _child_seconds()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert _child_seconds() - before < BUILD_SECONDS
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375], ids=["desktop", "phone"])
def test_pages_have_contrast_and_nothing_sticks_out(
    chromium: Chromium, site: str, width: int, dark: bool
) -> None:
    with contextlib.closing(chromium.new_page()) as page:
        page.resize(width, 860, dark=dark)
        for name in SHOWN:
            page.open(f"{site}/{name}.html")
            # The theme's script lays out tables and blocks of code when they are there.
            page.run("new Promise((done) => setTimeout(done, 300))")
            page.run(AXE.read_text() + "; true")
            found = page.run("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa']})")
            faults = [
                (fault["id"], node["target"])
                for fault in found["violations"]
                for node in fault["nodes"]
            ]
            assert faults == [], name
            assert page.run("document.documentElement.scrollWidth") <= width, name
        assert [url for url in page.requested if not url.startswith((site, "data:"))] == []
