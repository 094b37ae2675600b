"""What a log on JetStream owes to its writers and readers, also when the server restarts or the log
is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from pathlib import Path
from typing import Any

import pytest

from headwater.gateway.buckets import FAILURES, Overtaken
from headwater.gateway.jobs.durable import BACKGROUND_LOG, RESULTS, Durable
from headwater.gateway.jobs.event_log import EventLog, LogReader
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.stack.embedded import start_nats


def events_of(durable: Durable, name: str = "") -> EventLog:
    return EventLog(
        durable, BACKGROUND_LOG, subjects.background_events("t", name or uuid.uuid4().hex)
    )


def results_of(durable: Durable) -> EventLog:
    return EventLog(durable, f"KV_{RESULTS}", f"$KV.{RESULTS}.{uuid.uuid4().hex}.1")


async def read(reader: LogReader, num_messages: int) -> list[bytes]:
    """The next messages; a server that is away is asked again."""
    found: list[bytes] = []
    async with asyncio.timeout(120):
        while len(found) < num_messages:
            try:
                message = await reader.next(0.5)
            except FAILURES:
                await asyncio.sleep(0.1)
                continue
            if message is not None:
                found.append(message.data)
    return found


async def append(log: EventLog, payload: bytes, after: int) -> int:
    async with asyncio.timeout(120):
        while True:
            try:
                return await log.append(payload, after=after)
            except FAILURES:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("log_of", [events_of, results_of])
async def test_the_second_of_two_writers_behind_one_message_is_overtaken(
    log_of: Any, nats_url: str
) -> None:
    async with Bus.open(nats_url) as bus:
        log = log_of(Durable(bus))
        assert await log.is_empty()
        first = await log.append(b"a", after=0)
        second = await log.append(b"b", after=first)
        for after in (0, first):
            with pytest.raises(Overtaken):
                await log.append(b"c", after=after)
        last = await log.append(b"c", after=second)
        stored = [each async for each in log.stored()]
    # A bucket keeps the last message under a subject, a stream of events all of them.
    assert stored[-1] == (last, b"c")
    assert [data for _, data in stored] == ([b"a", b"b", b"c"] if log_of is events_of else [b"c"])


async def test_each_message_is_read_once_and_in_order_over_restarts_of_the_server(
    free_dir: Path, kept: dict[str, Any]
) -> None:
    nats = await start_nats(free_dir, jetstream=free_dir / "js", **kept)
    after = 0
    found = list[bytes]()
    async with contextlib.AsyncExitStack() as servers:
        servers.push_async_callback(nats.stop)
        async with Bus.open(nats.url) as bus, (log := events_of(Durable(bus))).reader() as reader:
            for round_ in range(3):
                for number in range(3):
                    after = await append(log, b"%d" % (3 * round_ + number), after)
                # The reader has some of them, and the server has sent others, when it ends.
                found += await read(reader, 2)
                await nats.kill()
                nats = await start_nats(free_dir, port=nats.port, jetstream=free_dir / "js", **kept)
                servers.push_async_callback(nats.stop)
            found += await read(reader, 3)
            after = await append(log, b"9", after)
            found += await read(reader, 1)
            assert await reader.next(0.1) is None
    assert found == [b"%d" % number for number in range(10)]


async def test_a_log_that_is_dropped_is_empty_and_a_reader_goes_on_with_what_follows(
    nats_url: str,
) -> None:
    async with Bus.open(nats_url) as bus:
        durable = Durable(bus)
        log = events_of(durable)
        other = events_of(durable)
        last = await log.append(b"a", after=0)
        await other.append(b"other", after=0)
        async with log.reader() as reader:
            assert await read(reader, 1) == [b"a"]
            await log.drop()
            assert await log.is_empty()
            assert [each async for each in log.stored()] == []
            assert await reader.next(0.1) is None
            with pytest.raises(Overtaken):
                await log.append(b"b", after=last)
            await log.append(b"b", after=0)
            assert await read(reader, 1) == [b"b"]
        assert not await other.is_empty()


async def test_a_reader_of_headers_gets_no_payload(nats_url: str) -> None:
    async with Bus.open(nats_url) as bus:
        log = results_of(Durable(bus))
        await log.append(b"a long result", after=0, headers={"Size": "13"})
        async with log.reader(headers_only=True) as reader:
            message = await reader.next(20)
    assert message is not None
    assert (message.data, (message.headers or {})["Size"]) == (b"", "13")
