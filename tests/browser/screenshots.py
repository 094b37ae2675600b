"""The console's screenshots in docs/images: `python -m tests.browser.screenshots URL`, of a
deployment without keys.

Asks a question and keeps a few requests under way meanwhile, so that the pages show something.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from .chromium import Chromium, Page, find_chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images"
QUESTION = "What is a headwater? Answer in two sentences, then name two rivers as a list."
PREFIXES = [
    "You are a careful assistant of a library that answers questions about rivers, lakes and "
    "springs. " * 10,
    "You review code for a compiler team, line by line and politely, and name risks first. " * 10,
]
TENANTS = ("ada", "grace", "linus")
LOAD_SECONDS = 25.0
NUM_CLIENTS = 6


def keep_asking(url: str, number: int, until: float) -> None:
    draw = random.Random(number)
    with httpx.Client(base_url=url, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        while time.monotonic() < until:
            system = draw.choice(PREFIXES)
            user = f"Question {draw.randint(0, 9)}: what is a headwater?"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            body = {
                "model": model,
                "messages": messages,
                "max_tokens": draw.randint(40, 200),
                "ignore_eos": True,
            }
            client.post(
                "/v1/chat/completions", json=body, headers={"x-tenant": draw.choice(TENANTS)}
            )


def show(page: Page, view: str, file: str, width: int, height: int, *, dark: bool = False) -> None:
    page.resize(width, height, dark=dark)
    page.run(f"location.hash = '#{view}'")
    time.sleep(1.5)
    page.screenshot(IMAGES / file)


def main(url: str) -> None:
    program = find_chromium()
    if program is None:
        sys.exit("Chromium is missing")
    with (
        tempfile.TemporaryDirectory() as profile,
        Chromium.running(program, Path(profile)) as browser,
    ):
        page = browser.new_page()
        page.resize(1100, 720)
        page.open(url)
        page.wait("document.querySelector('#state').textContent === 'live'")
        page.type("#question", QUESTION)
        page.press("Enter", "\r")
        page.wait("document.querySelector('.assistant .facts:not([hidden], .waiting)')", 120)
        show(page, "chat", "console-chat.png", 1100, 720)
        until = time.monotonic() + LOAD_SECONDS
        clients = [
            threading.Thread(target=keep_asking, args=(url, number, until))
            for number in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        page.run("location.hash = '#live'")
        time.sleep(LOAD_SECONDS * 0.6)
        show(page, "live", "console-live.png", 1280, 900)
        show(page, "live", "console-live-dark.png", 1280, 900, dark=True)
        show(page, "live", "console-small.png", 375, 740)
        for client in clients:
            client.join()


if __name__ == "__main__":
    main(sys.argv[1])
