"""Whatever dies under load costs no answer."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from headwater.services.stack.embedded import EmbeddedServer, start_nats, start_valkey
from tests.forked_cluster import ForkedCluster
from tests.gateway.processes import UNDRAFTED
from tests.line.test_line_end import wait_until_it_knows_all
from tests.line.test_line_prefix import costs_least

SMALL = ("--executor=simulated", "--replicas=2")


class Load:
    """Short answers, one after another, from a few clients at once."""

    def __init__(self, line: Any, num_clients: int) -> None:
        self.num_answered = 0
        self.failures: list[str] = []
        self._line = line
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(each,)) for each in range(num_clients)
        ]

    def _ask(self, client_idx: int) -> None:
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": f"I am client {client_idx}. " * 20,
            "max_tokens": 8,
        }
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


@asynccontextmanager
async def own_servers() -> AsyncIterator[dict[str, EmbeddedServer]]:
    """Servers by name. Those that are in it when the context ends are stopped."""
    servers: dict[str, EmbeddedServer] = {}
    try:
        yield servers
    finally:
        for server in servers.values():
            await server.stop()


@pytest.mark.slow
@pytest.mark.long
async def test_no_request_fails_while_redis_and_nats_are_away_and_both_are_filled_again(
    start_line: Any, tmp_path: Path
) -> None:
    """One at a time they are killed in the schedules of `tests/bench/test_cluster.py`."""
    start = {"redis": start_valkey, "nats": start_nats}
    async with own_servers() as servers:
        for name, each in start.items():
            servers[name] = await each(tmp_path / name)
        urls = [f"--{name}-url={server.url}" for name, server in servers.items()]
        line = await asyncio.to_thread(start_line, *SMALL, *urls, start=ForkedCluster)
        with Load(line, num_clients=4).running() as load:
            await load.answers(20)
            for server in servers.values():
                await server.kill()
            # Longer than a lease, a heartbeat's expiry and the patience of any client of them.
            began = time.monotonic()
            while time.monotonic() - began < 6:
                await load.answers(20)
            for name, server in list(servers.items()):
                servers[name] = await start[name](tmp_path / name, port=server.port)
            async with asyncio.timeout(60):
                while not await is_known_again(line, servers["redis"].url):  # noqa: ASYNC110 (other processes)
                    await asyncio.sleep(0.05)
            await load.answers(40)
        assert load.failures == []
        assert await asyncio.to_thread(line.stop) == 0


async def is_known_again(line: Any, redis_url: str) -> bool:
    """The gateway's index and that in Redis have both engines, Redis has the tenant's share."""
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        columns = [await client.hgetall(key) for key in await client.keys("slots:*")]
        shares = await client.hlen("fair:{tenants}")
    live = [
        field
        for column in columns
        for field, value in column.items()
        if field.endswith(":live") and value == "1"
    ]
    return (
        len(live) == 2
        and shares > 0
        and await asyncio.to_thread(line.metric, "headwater_index_synced") == 2
    )


@pytest.mark.slow
def test_a_killed_engine_costs_no_answer_and_comes_back_as_another_incarnation(
    simulated_line: Any,
) -> None:
    line = simulated_line
    before = {name: engine["epoch"] for name, engine in line.loads_of(2).items()}
    question = [
        {"role": "user", "content": "Which replica are you, and how long have you been there? " * 8}
    ]
    receipts = {"x-headwater-receipt": "1"}
    with line.stream_chat(question, max_tokens=800, ignore_eos=True, **UNDRAFTED) as events:
        request_id = next(events)["id"]
        (home,) = replicas_of(line, request_id)
        os.kill(line.pid_of(home), signal.SIGKILL)
        *_, last = events
    (other,) = before.keys() - {home}
    assert last["choices"][0]["finish_reason"] == "length"
    assert replicas_of(line, request_id) == [home, other]
    line.wait_for(
        lambda: line.loads().get(home, {}).get("epoch") not in (None, before[home]), 60, "not back"
    )
    assert line.loads_of(2)[other]["epoch"] == before[other]
    wait_until_it_knows_all(line)
    decision = line.chat(question, headers=receipts)["receipt"]["decision"]
    candidates = {each["replica_id"]: each for each in decision["candidates"]}
    assert candidates[other]["matched_tokens"] > 0
    assert candidates[home]["matched_tokens"] == 0, "bits of the dead incarnation"
    # Another replica may be chosen: learned speeds may differ by more than the prefix saves.
    assert costs_least(decision["replica_id"], candidates)


def replicas_of(line: Any, request_id: str) -> list[str]:
    """Where an answer was computed, one after the other."""
    (prompt,) = line.client.get(f"/v1/requests/{request_id}/explain").json()["prompts"]
    return [attempt["decision"]["replica_id"] for attempt in prompt["attempts"]]


@pytest.mark.long
async def test_with_one_of_each_stage_all_may_die_and_answers_and_requests_wait_for_those_that_follow(
    start_line: Any,
) -> None:
    line = await asyncio.to_thread(
        start_line, "--executor=simulated", "--replicas=1", start=ForkedCluster
    )
    reported: dict[str, Any] = {
        "max_tokens": 400,
        "ignore_eos": True,
        "temperature": 1,
        "seed": 3,
    } | UNDRAFTED
    expected = await asyncio.to_thread(text_of, line, "Once upon a time", **reported)
    victims = {
        name: line.pid_of(name) for name in ("processor-0", "output-processor-0", "engine-0")
    }
    with Load(line, num_clients=4).running() as load:
        await load.answers(8)
        with line.stream("Once upon a time", **reported) as events:
            text = next(events)["choices"][0]["text"]
            for pid in victims.values():
                os.kill(pid, signal.SIGKILL)
            text += await asyncio.to_thread(
                lambda: "".join(event["choices"][0]["text"] for event in events)
            )
        await load.answers(8)
    assert text == expected
    assert load.failures == []
    assert {name: line.pid_of(name) for name in victims}.items().isdisjoint(victims.items())
    assert await asyncio.to_thread(line.stop) == 0


def text_of(line: Any, prompt: str, **more: Any) -> str:
    with line.stream(prompt, **more) as events:
        return "".join(event["choices"][0]["text"] for event in events)
