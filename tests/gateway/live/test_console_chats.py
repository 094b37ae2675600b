"""Chats of the console in a real Chromium: kept, found again, changed, and written as programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Chromium, Page
from tests.gateway.processes import Gateway
from tests.gateway.scripted_conversation import IN_CHAT
from tests.gateway.scripted_model import ScriptedModel

QUESTION = "Name a 'river' in Ulm."

# CI has no browser; `make test-long` installs one.
pytestmark = pytest.mark.long


@pytest.fixture
def page(chromium: Chromium, scripted: tuple[Gateway, ScriptedModel]) -> Iterator[Page]:
    page = chromium.new_page()
    page.open(scripted[0].rest)
    yield page
    assert page.complaints == []
    page.close()


def ask(page: Page, text: str, num_answers: int) -> None:
    page.type("#question", text)
    page.press("Enter", "\r")
    done = "document.querySelectorAll('.assistant .sign.answer').length"
    page.wait(f"{done} === {num_answers} && document.querySelector('#send').innerText === 'Send'")


def messages(page: Page) -> list[list[dict[str, Any]]]:
    """Messages of the chats that the browser keeps, newest first."""
    kept: list[list[dict[str, Any]]] = page.run(
        "Object.values(localStorage).map(JSON.parse).sort((a, b) => b.at - a.at)"
        ".map(({messages}) => messages)"
    )
    return kept


def test_a_chat_is_found_again_answered_anew_branched_and_deleted(page: Page) -> None:
    ask(page, QUESTION, 1)
    assert page.run("document.querySelector('.thoughts').open") is False
    assert page.run("document.querySelector('.thought').textContent")
    [[asked, answer]] = messages(page)
    assert (asked["content"], answer["role"]) == (QUESTION, "assistant")
    assert answer["reasoning_content"]
    assert answer["content"]

    page.click(".sign.answer")
    page.wait("document.querySelectorAll('.assistant .sign.answer').length === 1")
    page.wait("document.querySelector('#send').innerText === 'Send'")
    assert messages(page) == [[asked, answer]]

    page.click(".sign.edit")
    assert page.run("document.querySelector('#question').value") == QUESTION
    ask(page, "Name a town.", 1)
    assert [each[0]["content"] for each in messages(page)] == ["Name a town.", QUESTION]

    page.click("#chats summary")
    page.type("#chats input", "RIVER")
    page.wait("document.querySelectorAll('.chat-list .title').length === 1")
    page.click("[aria-label^=Rename]")
    page.type("dialog input", "Rivers")
    page.press("Enter", "\r")
    page.click(".chat-list .title")
    page.wait("document.querySelector('.user')?.innerText.includes('river')")
    page.click("#chats summary")
    assert page.text(".chat-list .title") == "Rivers"
    page.click("[aria-label='Delete Rivers']")
    page.click("dialog .actions button")
    page.wait("!document.querySelector('article')")
    assert [each[0]["content"] for each in messages(page)] == ["Name a town."]


def test_tools_are_tried_by_hand_call_by_call(page: Page) -> None:
    page.run("document.querySelector('.options').open = true")
    page.type(".panel [name=tools]", json.dumps(IN_CHAT["tools"]))
    page.run("document.querySelector('.options').open = false")
    ask(page, "What is the weather in Ulm?", 1)
    shown = page.run("[...document.querySelectorAll('.call')].map((call) => call.innerText)")
    assert [each.split() for each in shown] == [
        ["calls", "weather", '{"city":', '"Ulm"}'],
        ["calls", "time", "{}"],
    ]
    assert page.run("document.querySelector('#question').placeholder") == "Result of weather"
    page.type("#question", "Rain.")
    page.press("Enter", "\r")
    # Both calls get their results before the model is asked.
    page.wait("document.querySelector('#question').placeholder === 'Result of time'")
    assert page.run("document.querySelectorAll('.assistant').length") == 1
    ask(page, "Noon.", 2)
    [kept] = messages(page)
    assert [each["role"] for each in kept] == ["user", "assistant", "tool", "tool", "assistant"]
    ids = [call["id"] for call in kept[1]["tool_calls"]]
    assert [(each["tool_call_id"], each["content"]) for each in kept[2:4]] == [
        (ids[0], "Rain."),
        (ids[1], "Noon."),
    ]


def test_a_chat_is_shown_as_programs_that_send_it(
    page: Page, scripted: tuple[Gateway, ScriptedModel]
) -> None:
    ask(page, QUESTION, 1)
    page.click("#code")
    page.wait("document.querySelectorAll('dialog pre').length === 3")
    curl, python, over_grpc = page.run(
        "[...document.querySelectorAll('dialog pre')].map((each) => each.innerText)"
    )
    sent = subprocess.run(["bash", "-c", f"{curl} -s"], capture_output=True, check=True, text=True)
    assert json.loads(sent.stdout)["choices"][0]["message"]["content"]
    assert "import os" not in python
    compile(python, "program", "exec")
    assert f'base_url="{scripted[0].rest}/v1"' in python
    # Without NATS the page does not know the port of gRPC, and names the usual one.
    program = over_grpc.replace("127.0.0.1:8001", scripted[0].grpc)
    reported = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert reported.stdout.strip(), reported.stderr


def test_a_chat_is_exported_as_the_body_of_a_request(page: Page, tmp_path: Path) -> None:
    ask(page, QUESTION, 1)
    page.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#chats summary")
    page.click("[aria-label^=Export]")
    name = "Name-a-river-in-Ulm-.json"
    page.wait("new Promise((done) => setTimeout(() => done(true), 300))")
    assert json.loads((tmp_path / name).read_text())["messages"][0]["content"] == QUESTION
