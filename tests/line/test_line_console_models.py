"""The buttons of the console's page of models: adapters, and models that take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium, Page
from tests.chatting_model import make_chatting_model
from tests.engine_core.small_adapters import tensors_of, write_adapter
from tests.forked_cluster import ForkedCluster
from tests.line.conftest import MODEL, Line
from tests.line.test_line_console import go, rows, until

pytestmark = pytest.mark.long


@contextlib.contextmanager
def opened(chromium: Chromium, line: Line) -> Iterator[Page]:
    """The page of models, which breaks no rule."""
    with contextlib.closing(chromium.new_page()) as page:
        page.resize(1280, 860)
        page.open(line.record.rest)
        page.wait("document.querySelector('#state').textContent === 'live'")
        go(page, "models")
        yield page
        assert page.complaints == []


def sent(page: Page, words: str) -> None:
    """Waits until the page tells how something ended."""
    page.wait(f"document.querySelector('.notice').innerText.includes({words!r})", 60)


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """Two models with room for both."""
    folder = tmp_path_factory.mktemp("turns")
    flags = (
        f"--model=one={make_chatting_model(folder / 'one')}",
        f"--model=two={make_chatting_model(folder / 'two')}",
        "--resident=0.003",
    )
    env = {"HEADWATER_CACHE": str(folder / "cache"), "HEADWATER_KV_CACHE_MEMORY": str(64 << 20)}
    (folder / "state").mkdir()
    with Line(folder / "state", *flags, env=env) as line:
        yield line


def test_a_model_is_pinned_unpinned_put_to_sleep_and_woken(chromium: Chromium, turns: Line) -> None:
    with opened(chromium, turns) as page:

        def turn(name: str) -> str:
            return rows(page, "Models").get(name, {}).get("turn", "")

        def press(button: str) -> None:
            page.click(f"[aria-label='{button} one']:not([hidden])")

        until(page, lambda: turn("one"), "it takes no turns")
        press("Pin")
        sent(page, "one: pin")
        until(page, lambda: turn("one").startswith("awake, pinned"), "it is not pinned")
        press("Unpin")
        until(page, lambda: "pinned" not in turn("one"), "it stays pinned")
        press("Sleep")
        until(page, lambda: turn("one").startswith("asleep"), "it stays awake")
        press("Wake")
        until(page, lambda: turn("one").startswith("awake,"), "it does not wake")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """An engine that takes adapters."""
    flags = ("--executor=simulated", "--replicas=1", "--adapter-memory=1000000")
    with Line(tmp_path_factory.mktemp("adapters"), *flags, start=ForkedCluster) as line:
        yield line


def test_an_adapter_is_loaded_answers_and_is_unloaded(
    chromium: Chromium, engine: Line, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "support", tensors_of(1, num_layers=1))
    with opened(chromium, engine) as page:

        def load(folder: Path) -> None:
            page.run(
                "[...document.querySelectorAll('button')].find("
                "(each) => each.textContent === 'Load an adapter').click()"
            )
            page.type("dialog [name=name]", "support")
            page.type("dialog [name=folder]", str(folder))
            page.click("dialog .actions button:not(.quiet)")

        load(tmp_path / "nothing")
        page.wait("document.querySelector('dialog').innerText.includes('adapter_config.json')", 60)
        page.press("Escape")
        page.wait("!document.querySelector('dialog[open]')")
        load(tmp_path / "support")
        sent(page, "the adapter support is served by engine-0")
        row = until(page, lambda: rows(page, "Adapters").get("support"), "it is not shown")
        assert (row["base model"], row["rank"], row["tenants"]) == (MODEL, "4", "all")
        body = {"model": "support", "prompt": "A river", "max_tokens": 3}
        assert engine.client.post("/v1/completions", json=body).status_code == 200
        page.click("[aria-label='Unload support']")
        page.click("dialog .actions button:not(.quiet)")
        sent(page, "the adapter support is unloaded")
        until(page, lambda: "support" not in rows(page, "Adapters"), "it is still shown")
        assert engine.client.post("/v1/completions", json=body).status_code == 404
