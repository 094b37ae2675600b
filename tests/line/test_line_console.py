"""The console in a real Chromium, over a deployment of real processes: what a person does there,
and what they see."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import MISSING, Chromium, Page, PageError, find_chromium
from tests.browser.install import AXE
from tests.gateway.processes import UNDRAFTED
from tests.line.conftest import MODEL, Line

VIEWS = ("chat", "live", "models", "batches", "tenants", "system", "health")
HOSTILE = '<img src=x onerror="window.pwned = 1"><script>window.pwned = 1</script> **bold** `code`'

# CI has no browser; `make test-long` installs one.
pytestmark = pytest.mark.long


@pytest.fixture
def page(chromium: Chromium, simulated_line: Line) -> Iterator[Page]:
    """The console as it opens. Whatever a test does there, it loads nothing from elsewhere and
    breaks no rule."""
    with contextlib.closing(chromium.new_page()) as opened:
        opened.resize(1280, 860)
        opened.open(simulated_line.record.rest)
        opened.wait("document.querySelector('#state').textContent === 'live'")
        yield opened
        assert [
            url
            for url in opened.requested
            if not url.startswith((simulated_line.record.rest, "data:"))
        ] == []
        assert opened.complaints == []


def go(page: Page, view: str) -> None:
    page.run(f"location.hash = '#{view}'")
    page.wait(f"document.body.dataset.view === '{view}'")


def rows(page: Page, table: str) -> dict[str, dict[str, str]]:
    """The rows of a table, by what heads them: each cell by its title."""
    script = f"""Object.fromEntries([...document.querySelectorAll('[aria-label={json.dumps(table)}] tbody tr')].map(
        (row) => [row.children[0].innerText, Object.fromEntries([...row.children].map(
            (cell) => [cell.dataset.title, cell.innerText]))]))"""
    reported: dict[str, dict[str, str]] = page.run(script)
    return reported


def until(page: Page, found: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first thing found that is true."""
    for _ in range(round(seconds / 0.1)):
        if value := found():
            return value
        page.run("new Promise((done) => setTimeout(done, 100))")
    raise AssertionError(f"{what}; the page says:\n{page.text()}")


def stage(page: Page, kind: str) -> dict[str, str]:
    """The row of the process of a kind in front of the engines."""
    return rows(page, "Stages in front of the engines")[kind]


def tile(page: Page, title: str) -> str:
    script = f"""[...document.querySelectorAll('.tile')].find(
        (each) => each.children[1].textContent === {json.dumps(title)})?.children[0].textContent"""
    return str(page.run(script))


def set_option(page: Page, name: str, value: str) -> None:
    page.run("document.querySelector('.options').open = true")
    page.type(f".panel [name={name}]", value)
    page.run(
        f"document.querySelector('.panel [name={name}]').dispatchEvent(new Event('change', "
        f"{{bubbles: true}}))"
    )
    page.run("document.querySelector('.options').open = false")


def ask(page: Page, text: str) -> None:
    page.type("#question", text)
    page.press("Enter", "\r")


def ended(page: Page) -> None:
    page.wait("document.querySelector('#send').textContent === 'Send'")


def test_a_turn_is_chatted_counted_and_still_there_after_a_reload(
    page: Page, simulated_line: Line
) -> None:
    set_option(page, "max_tokens", "12")
    ask(page, "Name a <b>river</b>.")
    page.wait(
        "document.querySelector('.assistant .facts:not([hidden])')?.innerText.includes('12 tokens')"
    )
    ended(page)
    assert "served by engine-" in page.text(".assistant")
    assert "Name a <b>river</b>." in page.text(".user")
    answer = page.text(".assistant .text")
    assert answer
    page.open(simulated_line.record.rest)
    page.wait("document.querySelector('.assistant .text')?.innerText")
    assert page.text(".assistant .text") == answer
    assert page.text(".user") == "Name a <b>river</b>."
    page.click("#new")
    assert page.run("document.querySelectorAll('article').length") == 0


def test_an_answer_with_html_and_script_stays_text(page: Page) -> None:
    set_option(page, "schema", json.dumps({"enum": [HOSTILE]}))
    set_option(page, "max_tokens", "200")
    ask(page, "Answer.")
    page.wait(
        "document.querySelector('.assistant .facts:not([hidden])')?.innerText.includes('tokens')"
    )
    ended(page)
    shown = page.text(".assistant .text")
    assert "<script>window.pwned = 1</script>" in shown
    assert page.run("document.querySelectorAll('.assistant .text :is(img, script)').length") == 0
    assert page.run("window.pwned") is None
    assert page.text(".assistant .text strong") == "bold"
    assert page.text(".assistant .text code") == "code"


def test_an_answer_that_has_ended_is_whole_on_a_page_that_draws_no_frames(page: Page) -> None:
    page.run("window.requestAnimationFrame = () => 1")
    set_option(page, "schema", json.dumps({"enum": ["The whole answer."]}))
    set_option(page, "max_tokens", "200")
    ask(page, "Answer.")
    page.wait(
        "document.querySelector('.assistant .facts:not([hidden])')?.innerText.includes('tokens')"
    )
    ended(page)
    assert page.text(".assistant .text") == '"The whole answer."'


def test_escape_stops_an_answer_and_a_refused_turn_can_be_sent_again(page: Page) -> None:
    set_option(page, "max_tokens", "4000")
    ask(page, "Tell me everything.")
    page.wait("document.querySelector('.assistant .text')?.innerText.length > 20")
    page.press("Escape")
    page.wait("document.querySelector('.assistant:last-of-type')?.innerText.includes('stopped')")
    ended(page)
    page.click("#new")
    set_option(page, "temperature", "7")
    ask(page, "Name a river.")
    page.wait("document.querySelector('.failed')?.innerText.includes('temperature is 7')")
    set_option(page, "temperature", "0.5")
    set_option(page, "max_tokens", "5")
    page.click(".failed button")
    page.wait(
        "document.querySelector('.assistant .facts:not([hidden])')?.innerText.includes('5 tokens')"
    )
    ended(page)
    assert page.run("[...document.querySelectorAll('.user')].map((each) => each.innerText)") == [
        "Name a river."
    ]


def test_an_engine_that_starts_by_demand_is_waited_for_in_words(
    page: Page, simulated_line: Line
) -> None:
    asked = {"model": MODEL, "served_model_name": "late", "min_replicas": 0, "max_replicas": 1}
    assert simulated_line.client.post("/admin/models", json=asked).status_code == 202
    page.wait(
        "[...document.querySelector('#model').options].some(({value}) => value === 'late')", 60
    )
    page.run("document.querySelector('#model').value = 'late'")
    set_option(page, "max_tokens", "6")
    ask(page, "Name a river.")
    page.wait(
        "document.querySelector('.assistant .waiting')?.innerText === 'waiting for an engine "
        "to start…'"
    )
    page.wait(
        "document.querySelector('.assistant .facts:not([hidden], "
        ".waiting)')?.innerText.includes('6 tokens')",
        60,
    )
    assert simulated_line.client.delete("/admin/models/late").status_code == 202
    page.wait(
        "![...document.querySelector('#model').options].some(({value}) => value === 'late')", 60
    )


def test_figures_move_with_the_requests(page: Page, simulated_line: Line) -> None:
    go(page, "live")
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 7000,
        "ignore_eos": True,
    }
    body = asked | {"stream": True} | UNDRAFTED
    with simulated_line.client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        until(page, lambda: tile(page, "requests running") == "1", "no request is seen")
        until(
            page,
            lambda: float(tile(page, "tokens/s").replace("–", "0").replace(",", "")) > 10,
            "no tokens are seen",
        )
        (row,) = until(page, lambda: rows(page, "Requests that wait or run").values(), "no row")
        assert row["state"] in ("prefill", "decode")
        explain = "[aria-label='Requests that wait or run'] button"
        assert (
            page.run(f"document.querySelector({json.dumps(explain)}).getBoundingClientRect().right")
            <= 1280
        )
        until(
            page,
            lambda: stage(page, "output processor")["running"] == "1",
            "the output processor tells of none",
        )
        # Each stage reports its own figures, and the reports arrive at different times.
        until(page, lambda: stage(page, "gateway")["running"] == "1", "the gateway tells of none")
        until(
            page, lambda: stage(page, "processor")["running"] == "0", "the processor tells of one"
        )
        until(
            page, lambda: stage(page, "gateway")["index lag, p99"].endswith("s"), "no lag is told"
        )
    until(page, lambda: tile(page, "requests running") == "0", "the request is still there")
    page.click("[aria-label='Requests that have ended'] button")
    page.wait("document.querySelector('dialog')?.innerText.includes('tokens predicted cached')")
    page.press("Escape")


def test_an_engine_that_is_killed_is_seen_leaving_and_coming_back(
    page: Page, simulated_line: Line
) -> None:
    go(page, "live")
    until(
        page,
        lambda: {"engine-0", "engine-1"} == rows(page, "Engines").keys(),
        "the engines are not seen",
    )
    for pid in simulated_line.pids_of("engine-1"):
        # The core ends with its server, and may be gone already.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    page.wait("document.querySelector('.events').innerText.includes('engine-1 has left')", 60)
    page.wait("document.querySelector('.events').innerText.includes('engine-1 has come')", 60)
    until(page, lambda: {"engine-0", "engine-1"} == rows(page, "Engines").keys(), "it is not back")


def test_an_engine_is_drained_by_two_clicks(page: Page) -> None:
    go(page, "live")
    page.click("[aria-label='Drain engine-0']")
    page.wait("document.querySelector('dialog')?.innerText.includes('Drain engine-0?')")
    page.click("dialog button:not(.quiet)")
    page.wait("document.querySelector('.notice').innerText.includes('engine-0 has drained')", 60)
    until(
        page,
        lambda: rows(page, "Engines").get("engine-0", {}).get("state") == "serving",
        "it is not back",
    )


def test_a_model_is_loaded_scaled_and_unloaded(page: Page) -> None:
    go(page, "models")

    def second() -> dict[str, str]:
        return rows(page, "Models").get("second", {})

    for name, value in (
        ("model", MODEL),
        ("served_model_name", "second"),
        ("max_replicas", "1"),
        ("min_replicas", "1"),
    ):
        page.type(f"#load [name={name}]", value)
    page.run("document.querySelector('#load ~ details').open = true")
    page.type("[name=max_model_len]", "512")
    page.click("#load button")
    until(page, lambda: second().get("state") in ("loading", "serving"), "it is not loading")
    until(
        page,
        lambda: second().get("state") == "serving" and second()["engines"] == "1 of 1",
        "it is not served",
    )
    assert second()["longest"] == "512 tokens"
    page.click("[aria-label='Scale second']")
    for name in ("min_replicas", "max_replicas"):
        page.type(f"dialog [name={name}]", "2")
    page.click("dialog .actions button:not(.quiet)")
    until(page, lambda: second().get("engines") == "2 of 2", "it is not scaled")
    page.click("[aria-label='Unload second']")
    page.click("dialog .actions button:not(.quiet)")
    until(page, lambda: not second(), "it is still there")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_fault_in_any_view(page: Page, dark: bool) -> None:
    page.resize(1280, 860, dark=dark)
    # As a script of the browser's own: the page's policy lets none of ours in. Its default rules
    # are those of WCAG A and AA, contrast among them, and good practice.
    page.run(AXE.read_text() + "; true")
    for view in VIEWS:
        go(page, view)
        page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.run("new Promise((done) => setTimeout(done, 500))")
        found = page.run("axe.run(document).then(({violations}) => violations)")
        faults = [
            (fault["id"], node["target"], node["failureSummary"])
            for fault in found
            for node in fault["nodes"]
        ]
        assert faults == [], view


def test_on_a_small_screen_nothing_sticks_out(page: Page) -> None:
    page.resize(375, 740)
    for view in VIEWS:
        go(page, view)
        page.run("new Promise((done) => setTimeout(done, 200))")
        assert page.run("document.documentElement.scrollWidth") <= 375, view
        assert page.run("document.querySelector('header').getBoundingClientRect().right") <= 375


def test_the_views_are_reached_by_keyboard(page: Page) -> None:
    page.run("document.querySelector('#views a').focus()")
    page.press("Tab")
    assert page.run("document.activeElement.hash") == "#live"
    page.press("Enter", "\r")
    page.wait("document.body.dataset.view === 'live'")
    assert page.run("document.activeElement.id") == "title"


def test_the_description_of_the_api_is_a_page(page: Page, simulated_line: Line) -> None:
    page.open(f"{simulated_line.record.rest}/docs")
    page.wait("document.body.innerText.includes('/v1/chat/completions')")
    assert page.run("document.querySelectorAll('.operation').length") > 30


def test_the_long_tests_have_a_browser_and_what_brings_axe_core() -> None:
    assert find_chromium() is not None, MISSING
    assert [program for program in ("node", "npm") if shutil.which(program) is None] == []


def test_every_rows_buttons_are_in_sight_at_1280_pixels(page: Page) -> None:
    for view in VIEWS:
        go(page, view)
        page.run("new Promise((done) => setTimeout(done, 300))")
        assert (
            page.run(
                "Math.max(0, ...[...document.querySelectorAll('td button')].map("
                "(each) => each.getBoundingClientRect().right))"
            )
            <= 1280
        ), view


def test_requests_are_filtered_by_what_became_of_them(page: Page, simulated_line: Line) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2}
    answered = simulated_line.client.post("/v1/completions", json=asked).json()["id"]
    request = answered.rpartition("-")[2]
    go(page, "live")
    ended = "Requests that have ended"
    until(page, lambda: request in rows(page, ended), "the request is not shown")
    page.type(".filter input", "no-such-id")
    until(page, lambda: not rows(page, ended), "the filter lets it through")
    for text in (answered, request[:10], request):
        page.type(".filter input", text)
        until(page, lambda: list(rows(page, ended)) == [request], "the request is not found")


def test_two_parameter_sets_answer_one_question_side_by_side(page: Page) -> None:
    for name, length in (("short", "3"), ("long", "9")):
        set_option(page, "max_tokens", length)
        page.run("document.querySelector('.options').open = true")
        page.run(
            "[...document.querySelectorAll('.panel button')].find("
            "(each) => each.innerText === 'Save as a preset').click()"
        )
        page.type("dialog input", name)
        page.press("Enter", "\r")
        page.wait("!document.querySelector('dialog')")
    page.run("document.querySelector('.options').open = false")
    page.click("#compare")
    page.type("dialog textarea", "Name a river.")
    page.run(
        "[...document.querySelectorAll('dialog .sides section')].forEach((side, i) => "
        "{ side.querySelectorAll('select')[1].value = ['short', 'long'][i]; })"
    )
    page.click("dialog .actions button")
    for idx, length in enumerate((3, 9)):
        page.wait(
            f"[...document.querySelectorAll('.side-answer')][{idx}].innerText"
            f".includes('{length} tokens')"
        )


def test_a_batch_is_started_followed_and_its_answers_are_downloaded(
    page: Page, tmp_path: Path
) -> None:
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": MODEL,
            "max_tokens": 3,
            "messages": [{"role": "user", "content": "Name a river."}],
        },
    }
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps(line) + "\n")
    page.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    go(page, "batches")
    page.choose_file("input[type=file]", asked)
    page.click("form button[type=submit]")
    until(
        page,
        lambda: [each["status"] for each in rows(page, "Batches").values()] == ["completed"],
        "the batch does not end",
        120,
    )
    [(batch, row)] = rows(page, "Batches").items()
    assert row["progress"] == "1 of 1"
    page.click(f"[aria-label='Download the answers of {batch}']")
    answers = tmp_path / f"{batch}.jsonl"
    until(page, answers.exists, "nothing is downloaded")
    assert json.loads(answers.read_text())["custom_id"] == "one"
    assert "asked.jsonl" in rows(page, "Files")


def test_the_system_page_shows_versions_stores_settings_and_log_lines(page: Page) -> None:
    go(page, "system")
    processes = until(page, lambda: rows(page, "Processes"), "no process")
    assert {"gateway-0", "processor-0", "output-processor-0", "engine-0"} <= processes.keys()
    assert all(each["version"].startswith("0.") for each in processes.values())
    stores = until(page, lambda: rows(page, "Stores and disks"), "no store")
    assert {each["kind"] for each in stores.values()} == {
        "NATS",
        "NATS stream",
        "Redis",
        "disk of supervisor-0",
    }
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    until(
        page,
        lambda: rows(page, "Settings in force").get("executor", {}).get("value") == "simulated",
        "the settings are not shown",
    )
    assert rows(page, "Settings in force")["executor"]["from"] == "flag"
    page.wait("document.querySelector('.log-lines').innerText.includes('starting')")


def test_a_script_that_throws_is_an_error_of_the_test(page: Page) -> None:
    with pytest.raises(PageError, match="no such thing"):
        page.run("Promise.reject(new Error('no such thing'))")
