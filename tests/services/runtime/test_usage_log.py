from __future__ import annotations

import asyncio
import datetime
import uuid
from collections.abc import Callable

import msgspec
import pytest
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.usage_log import MSG_ID, STREAM, UsageLog, UsageRecord, read_stream


async def test_a_report_that_is_not_understood_keeps_no_later_one_from_its_reader(
    nats_url: str,
) -> None:
    record = UsageRecord(
        request_id="r", tenant="ada", model="m", at=0.0, prompt_tokens=3, output_tokens=4
    )
    async with Bus.open(nats_url, wait_seconds=60) as bus:
        log = UsageLog(bus)
        reports = log.left()
        first = asyncio.ensure_future(anext(reports))
        # A subscription is known to the server when a later request of its connection is answered.
        await asyncio.sleep(0)
        await bus.request("unserved.subject", b"", seconds=0.05)
        await bus.publish(subjects.USAGE_LEFT, b"{")
        await bus.publish(subjects.USAGE_LEFT, b'{"request_id": 1}')
        await log.publish_left(record, 5)
        async with asyncio.timeout(60):
            left = await first
        assert (left.request_id, left.tenant, left.used, left.seq) == ("r", "ada", 7, 5)
        await reports.aclose()


def a_record(request_id: str) -> UsageRecord:
    return UsageRecord(
        request_id=request_id, tenant="ada", model="m", at=0.0, prompt_tokens=3, output_tokens=4
    )


def broken(seq: int) -> None:
    raise LookupError("a bug")


def nothing(seq: int) -> None:
    pass


@pytest.mark.parametrize(
    ("request_id", "on_stored"),
    [("unreadable", nothing), ("known", broken), ("no text: \ud800", nothing)],
    ids=["beside a stored one that cannot be read", "whose owner fails", "that cannot be encoded"],
)
async def test_records_behind_one_that_fails_are_stored(
    nats_url: str, request_id: str, on_stored: Callable[[int], None]
) -> None:
    async with Bus.open(nats_url, wait_seconds=60) as bus, UsageLog(bus).running() as log:
        await log.make()
        js = bus.jetstream()
        assert js is not None
        await js.publish(
            subjects.usage("ada"), b"{", headers={MSG_ID: log._seals.name_of("unreadable")}
        )
        stored = asyncio.get_running_loop().create_future()
        log.add(a_record(request_id), on_stored)
        log.add(a_record(f"behind {on_stored.__name__} {request_id[:5]}"), stored.set_result)
        async with asyncio.timeout(60):
            assert await stored > 0


async def test_records_that_are_removed_after_they_were_counted_are_not_awaited(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = f"test-{uuid.uuid4().hex}"
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    async with Bus.open(nats_url, wait_seconds=60) as bus, UsageLog(bus).running() as log:
        await log.make()
        js = bus.jetstream()
        assert js is not None
        for number in range(3):
            record = UsageRecord(request_id=f"{tenant}-{number}", tenant=tenant, model="m", at=0.0)
            await js.publish(subjects.usage(tenant), msgspec.json.encode(record))
        count = JetStreamContext.PullSubscription.consumer_info

        async def count_and_remove(messages: JetStreamContext.PullSubscription) -> ConsumerInfo:
            counted = await count(messages)
            await js.purge_stream(STREAM, subject=subjects.usage(tenant), keep=1)
            return counted

        monkeypatch.setattr(JetStreamContext.PullSubscription, "consumer_info", count_and_remove)
        found = [stored async for stored in read_stream(bus, STREAM, subjects.usage(tenant), since)]
        assert [msgspec.json.decode(each.data)["request_id"] for each in found] == [f"{tenant}-2"]
