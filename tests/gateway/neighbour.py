"""A tenant that asks the same small question at an even pace while another one does its worst."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx

from tests.gateway.processes import Gateway, chat_body

NUM_ALONE = 20
PAUSE_SECONDS = 0.25
MOST_SECONDS = 60.0
"""Of one answer, however busy the machine is: whoever waits longer was starved."""


def tenant_key(gateway: Gateway, admin_key: str, **settings: Any) -> str:
    """The key of a new tenant that the gateway knows."""
    headers = {"authorization": f"Bearer {admin_key}"}
    asked = {"id": f"t-{uuid.uuid4().hex[:8]}", **settings}
    made = gateway.client.post("/admin/tenants", json=asked, headers=headers)
    assert made.status_code == 201, made.text
    key: str = made.json()["key"]
    theirs = {"authorization": f"Bearer {key}"}
    gateway.wait_until(lambda: gateway.client.get("/v1/models", headers=theirs).status_code == 200)
    return key


class Neighbour:
    """Asks over connections of its own."""

    def __init__(self, gateway: Gateway, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=gateway.rest, headers=headers, timeout=MOST_SECONDS)
        self.answers: set[str] = set()
        """What was answered, without what differs by itself."""
        self.alone: list[float] = []
        self.beside: list[float] = []
        """Seconds of each answer."""
        self._fault: BaseException | None = None
        self._is_over = threading.Event()

    def ask(self) -> float:
        began = time.monotonic()
        reply = self._client.post(
            "/v1/chat/completions", json=chat_body(max_tokens=8, temperature=0)
        )
        assert reply.status_code == 200, (reply.status_code, reply.text)
        self.answers.add(str(reply.json()["choices"]))
        assert len(self.answers) == 1, self.answers
        return time.monotonic() - began

    def _ask_on(self) -> None:
        try:
            while not self._is_over.wait(PAUSE_SECONDS):
                self.beside.append(self.ask())
        except BaseException as fault:
            # Raised where the other tenant's test is.
            self._fault = fault

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """First alone, then beside what is done in this scope; every answer is good, the same, and
        in time."""
        with contextlib.closing(self._client):
            self.ask()
            self.alone = [self.ask() for _ in range(NUM_ALONE)]
            thread = threading.Thread(target=self._ask_on)
            thread.start()
            try:
                yield
            finally:
                self._is_over.set()
                thread.join()
        if self._fault is not None:
            raise self._fault
        assert self.beside
        print(f"neighbour: {self.reported}")

    @property
    def reported(self) -> str:
        alone = statistics.median(self.alone)
        beside = statistics.median(self.beside)
        most = sorted(self.beside)[-max(1, len(self.beside) // 100)]
        return (
            f"{len(self.beside)} answers, p50 {alone * 1e3:.0f} ms alone and {beside * 1e3:.0f} "
            "ms beside "
            f"({beside / alone:.1f} times), p99 {most * 1e3:.0f} ms, most "
            f"{max(self.beside) * 1e3:.0f} ms"
        )
