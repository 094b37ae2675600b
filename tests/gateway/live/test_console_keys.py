"""The console of a gateway with keys, in a real Chromium: what it shows to whom, and where the key
goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium, Page
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway

ADMIN_KEY = "admin-key-of-the-house"
ADAS_KEY = "key-of-ada"


@pytest.fixture(scope="module")
def keyed(
    behind: Behind,
    start_gateway: GatewayStarter,
    nats_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ada {ADAS_KEY}\ngrace key-of-grace\n")
    flags = (f"--nats-url={nats_url}", f"--admin-key={ADMIN_KEY}", f"--api-key-file={keys}")
    with start_gateway(behind, *flags) as gateway:
        yield gateway


def enter(page: Page, button: str, key: str) -> None:
    page.click(button)
    page.type("dialog #key", key)
    page.press("Enter", "\r")
    page.wait("document.querySelector('#state').textContent === 'live'")


def views(page: Page) -> list[str]:
    shown: list[str] = page.run(
        "[...document.querySelectorAll('#views a')].filter((each) => "
        "each.offsetParent).map((each) => each.hash)"
    )
    return shown


@pytest.mark.slow
def test_without_a_key_the_page_says_where_one_goes_and_shows_each_caller_its_own(
    chromium: Chromium, keyed: Gateway
) -> None:
    page = chromium.new_page()
    page.open(keyed.rest)
    page.wait("document.querySelector('#banner-text').textContent.includes('Enter a key')")
    page.type("#question", "Name a river.")
    page.press("Enter", "\r")
    page.wait("document.querySelector('.failed')?.innerText.includes('enter it under “Key” above')")
    enter(page, "#banner-key", ADAS_KEY)
    page.wait("document.querySelector('#who').textContent.startsWith('ada')")
    assert "#replicas" not in views(page)
    page.click(".failed button")
    page.wait(
        "document.querySelector('.assistant .facts:not([hidden], "
        ".waiting)')?.innerText.includes('tokens')"
    )
    page.run("location.hash = '#tenants'")
    page.wait("document.querySelectorAll('[aria-label=Tenants] tbody tr').length === 1")
    assert "grace" not in page.text()
    enter(page, "#key-button", ADMIN_KEY)
    page.wait("document.querySelector('#who').textContent.startsWith('administrator')")
    assert "#replicas" in views(page)
    assert [url for url in page.requested if ADAS_KEY in url or ADMIN_KEY in url] == []
    assert page.complaints == []
    page.close()
