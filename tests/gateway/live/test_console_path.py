"""The console below a path of a proxy, in a real Chromium: what it loads, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Chromium
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway

ROOT = "/team/llm"
VIEWS = ("models", "live", "health")

# CI has no browser; `make test-long` installs one.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def below(behind: Behind, start_gateway: GatewayStarter, nats_url: str) -> Iterator[Gateway]:
    with start_gateway(behind, f"--nats-url={nats_url}", f"--root-path={ROOT}") as gateway:
        yield gateway


def test_everything_that_the_console_asks_for_lies_below_its_path(
    chromium: Chromium, below: Gateway
) -> None:
    page = chromium.new_page()
    page.open(f"{below.rest}{ROOT}/")
    page.wait("document.querySelector('#state').textContent === 'live'")
    page.type("#question", "Name a river.")
    page.press("Enter", "\r")
    page.wait(
        "document.querySelector('.assistant .facts:not([hidden], "
        ".waiting)')?.innerText.includes('tokens')"
    )
    for view in VIEWS:
        page.run(f"location.hash = '#{view}'")
        page.wait(f"document.body.dataset.view === '{view}'")
    page.open(f"{below.rest}{ROOT}/docs")
    page.wait("document.body.innerText.includes('/v1/chat/completions')")
    asked = [url for url in page.requested if not url.startswith("data:")]
    assert [url for url in asked if not url.startswith(f"{below.rest}{ROOT}/")] == []
    assert any(url.endswith("/v1/chat/completions") for url in asked)
    assert page.complaints == []
    page.close()
