"""Whatever dies under load costs at most the answers that it was giving."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.services.stack.embedded import start_nats, start_valkey

SMALL = ("--executor=simulated", "--replicas=2")


class Load:
    """Short answers, one after another, from a few clients at once."""

    def __init__(self, line: Any, num_clients: int) -> None:
        self.num_answered = 0
        self.failures: list[str] = []
        self._line, self._stopping = line, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(each,)) for each in range(num_clients)]

    def _ask(self, client_idx: int) -> None:
        body = {"model": "smollm2-135m-instruct", "prompt": f"I am client {client_idx}. " * 20, "max_tokens": 8}
        with httpx.Client(base_url=self._line.record.rest, timeout=120) as client:
            while not self._stopping.is_set():
                reply = client.post("/v1/completions", json=body)
                if reply.status_code != 200:
                    self.failures.append(reply.text)
                self.num_answered += 1

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join()

    async def answers(self, more: int) -> None:
        """Returns when so many more answers have come."""
        goal = self.num_answered + more
        # A machine that is busy with other things is slow, not wrong.
        async with asyncio.timeout(120):
            while self.num_answered < goal:  # noqa: ASYNC110 (threads count)
                await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["redis", "nats"])
async def test_no_request_fails_while_a_server_of_facts_is_away(victim: str, start_line: Any, tmp_path: Path) -> None:
    start = {"redis": start_valkey, "nats": start_nats}
    servers = {name: await each(tmp_path / name) for name, each in start.items()}
    urls = [f"--{name}-url={server.url}" for name, server in servers.items()]
    line = await asyncio.to_thread(start_line, *SMALL, *urls)
    with Load(line, num_clients=4).running() as load:
        await load.answers(20)
        await servers[victim].kill()
        # Longer than a lease, a heartbeat's expiry and the patience of any client of it.
        began = time.monotonic()
        while time.monotonic() - began < 6:
            await load.answers(20)
        servers[victim] = await start[victim](tmp_path / victim, port=servers[victim].port)
        await load.answers(40)
    assert load.failures == []
    assert await asyncio.to_thread(line.stop) == 0
    for server in servers.values():
        await server.stop()


@pytest.mark.slow
def test_a_killed_engine_costs_its_own_streams_and_comes_back_as_another_incarnation(start_line: Any) -> None:
    line = start_line(*SMALL)
    before = {name: engine["epoch"] for name, engine in line.loads().items()}
    question = [{"role": "user", "content": "Which replica are you, and how long have you been there? " * 8}]
    receipts = {"x-headwater-receipt": "1"}
    home = line.chat(question, headers=receipts)["receipt"]["decision"]["replica_id"]
    (other,) = before.keys() - {home}
    with line.stream_chat(question, max_tokens=2000, ignore_eos=True) as events:
        next(events)
        os.kill(line.pid_of(home), signal.SIGKILL)
        *_, last = events
    assert last["error"]["type"] == "server_error"
    assert last["error"]["code"] == "engine_unavailable"
    assert line.chat(question, headers=receipts)["receipt"]["decision"]["replica_id"] == other
    line.wait_for(lambda: line.loads().get(home, {}).get("epoch") not in (None, before[home]), 20, "not back")
    assert line.loads()[other]["epoch"] == before[other]
    candidates = line.chat(question, headers=receipts)["receipt"]["decision"]["candidates"]
    matched = {each["replica_id"]: each["matched_tokens"] for each in candidates}
    assert matched[other] > 0
    assert matched[home] == 0, "bits of the dead incarnation"
    assert line.stop() == 0
