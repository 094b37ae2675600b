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

# CI has no browser; `make test-long` installs one.
pytestmark = pytest.mark.long


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
    assert "#system" not in views(page)
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
    assert "#system" in views(page)
    assert [url for url in page.requested if ADAS_KEY in url or ADMIN_KEY in url] == []
    assert page.complaints == []
    page.close()


def fill(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        page.type(f"dialog [name={name}]", value)
    page.press("Enter", "\r")


def limits_of(page: Page, tenant: str) -> str:
    script = f"""[...document.querySelectorAll('[aria-label=Tenants] tbody tr')].find(
        (row) => row.children[0].innerText === '{tenant}')?.innerText ?? ''"""
    return str(page.run(script))


def test_a_tenant_is_added_with_a_key_that_is_shown_once_changed_and_removed(
    chromium: Chromium, keyed: Gateway
) -> None:
    page = chromium.new_page()
    page.resize(1280, 860)
    page.open(keyed.rest)
    enter(page, "#key-button", ADMIN_KEY)
    page.run("location.hash = '#tenants'")
    page.run(
        "[...document.querySelectorAll('button')].find((e) => e.innerText === 'Add a tenant')"
        ".click()"
    )
    fill(page, id="no name")
    assert page.run("document.querySelector('dialog [name=id]').matches(':invalid')")
    fill(page, id="linus", requests_per_minute="60")
    page.wait("document.querySelector('dialog .secret')")
    key = page.text("dialog .secret")
    assert "only time" in page.text("dialog")
    headers = {"authorization": f"Bearer {key}"}
    assert keyed.client.get("/v1/models", headers=headers).status_code == 200
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    page.wait("document.querySelector('[aria-label=\"Change linus\"]')")
    assert "60 requests/min" in limits_of(page, "linus")
    right = "document.querySelector('[aria-label=\"Remove linus\"]').getBoundingClientRect().right"
    assert page.run(right) <= 1280

    page.click("[aria-label='Change linus']")
    page.run("document.querySelector('dialog [name=requests_per_minute]').value = ''")
    fill(page, concurrency="3")
    page.wait("!document.querySelector('dialog')")
    page.wait("document.querySelector('[aria-label=Tenants]').innerText.includes('3 at once')")
    assert "requests/min" not in limits_of(page, "linus")

    page.click("[aria-label='Keys of linus']")
    page.wait("document.querySelector('dialog tbody tr')")
    assert key not in page.text("dialog")
    page.click("dialog [aria-label^='Remove the key']")
    page.wait("document.querySelectorAll('dialog').length === 2")
    page.click("dialog:last-of-type .actions button")
    page.wait("document.querySelector('dialog').innerText.includes('cannot ask')")
    assert keyed.client.get("/v1/models", headers=headers).status_code == 401
    page.press("Escape")

    page.click("[aria-label='Remove linus']")
    page.click("dialog:last-of-type .actions button")
    page.wait("!document.querySelector('[aria-label=\"Remove linus\"]')")
    page.run("location.hash = '#system'")
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.wait("document.querySelector('[aria-label=\"Audit log\"]')?.innerText.includes('remove')")
    assert key not in page.text()
    assert [url for url in page.requested if ADMIN_KEY in url or key in url] == []
    assert page.complaints == []
    page.close()
