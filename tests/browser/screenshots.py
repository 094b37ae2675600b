"""The console's screenshots in docs/images/console, every view at three widths:
`python -m tests.browser.screenshots` starts a deployment of the demo model for them, and ends it.

Asks a question and keeps a few requests under way meanwhile, so that the pages show something.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.line.conftest import DEMO_ENV, MODEL, Line

from .chromium import Chromium, Page, find_chromium
from .install import install

IMAGES = Path(__file__).parents[2] / "docs" / "images" / "console"
VIEWS = ("chat", "live", "models", "batches", "tenants", "system", "health")
SIZES = ((1280, 900), (768, 900), (375, 740))
QUESTION = "What is a headwater? Answer in two sentences, then name two rivers as a list."
PREFIXES = [
    "You are a careful assistant of a library that answers questions about rivers, lakes and "
    "springs. " * 10,
    "You review code for a compiler team, line by line and politely, and name risks first. " * 10,
]
ADMIN_KEY = "administrators-key-of-the-pictures"
TENANTS = {"ada": {"requests_per_minute": 600}, "grace": {"concurrency": 8}, "linus": {}}
NUM_CLIENTS = 4
WARM_SECONDS = 40.0
"""Time for a sample of the last hours."""


@contextlib.contextmanager
def deployment() -> Iterator[Line]:
    """A deployment with tenants and requests under way."""
    env = DEMO_ENV | {"HEADWATER_ADMIN_KEY": ADMIN_KEY}
    with (
        tempfile.TemporaryDirectory() as folder,
        Line(Path(folder), f"--model={MODEL}", "--replicas=2", env=env) as line,
    ):
        line.client.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        keys = [
            line.client.post("/admin/tenants", json={"id": name, "limits": limits}).json()["key"]
            for name, limits in TENANTS.items()
        ]
        is_over = threading.Event()
        clients = [
            threading.Thread(target=keep_asking, args=(line.record.rest, keys, number, is_over))
            for number in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            start_batch(line.client)
            yield line
        finally:
            is_over.set()
            for client in clients:
                client.join()


def keep_asking(url: str, keys: list[str], number: int, is_over: threading.Event) -> None:
    draw = random.Random(number)
    with httpx.Client(base_url=url, timeout=120) as client:
        while not is_over.is_set():
            user = f"Question {draw.randint(0, 9)}: what is a headwater?"
            body = {
                "model": MODEL,
                "messages": [
                    {"role": "system", "content": draw.choice(PREFIXES)},
                    {"role": "user", "content": user},
                ],
                "max_tokens": draw.randint(20, 80),
            }
            headers = {"authorization": f"Bearer {draw.choice(keys)}"}
            client.post("/v1/chat/completions", json=body, headers=headers)


def start_batch(client: httpx.Client) -> None:
    lines = "".join(
        f'{{"custom_id": "{number}", "method": "POST", "url": "/v1/completions", "body": '
        f'{{"model": "{MODEL}", "prompt": "A river", "max_tokens": 8}}}}\n'
        for number in range(20)
    )
    file = client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("rivers.jsonl", lines.encode())}
    ).json()
    asked = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    client.post("/v1/batches", json=asked)


def show(page: Page, view: str, width: int, height: int, *, dark: bool = False) -> None:
    page.resize(width, height, dark=dark)
    time.sleep(1.5)
    page.screenshot(IMAGES / f"{view}-{width}{'-dark' if dark else ''}.webp")


def main() -> None:
    install()
    program = find_chromium()
    assert program is not None
    IMAGES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as profile,
        Chromium.running(program, Path(profile)) as browser,
        deployment() as line,
    ):
        page = browser.new_page()
        page.resize(*SIZES[0])
        page.open(line.record.rest)
        page.click("#key-button")
        page.type("dialog #key", ADMIN_KEY)
        page.press("Enter", "\r")
        page.wait("document.querySelector('#state').textContent === 'live'")
        page.type("#question", QUESTION)
        page.press("Enter", "\r")
        page.wait("document.querySelector('.assistant .facts:not([hidden], .waiting)')", 240)
        page.run("location.hash = '#live'")
        time.sleep(WARM_SECONDS)
        for view in VIEWS:
            page.run(f"location.hash = '#{view}'")
            for width, height in SIZES:
                show(page, view, width, height)
        page.run("location.hash = '#live'")
        show(page, "live", *SIZES[0], dark=True)


if __name__ == "__main__":
    sys.exit(main())
