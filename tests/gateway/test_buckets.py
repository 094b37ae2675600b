"""Values of buckets, some of which are deleted while they are read; sentences that clients get
while storage in NATS is out of reach."""

from __future__ import annotations

import uuid

import nats.errors
import nats.js.errors
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo

from headwater.gateway.buckets import drop_keys, entries, or_unavailable, sizes
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import Unavailable

SENTENCES = [
    (TimeoutError(), "durable storage in NATS does not answer: no reply in time"),
    (nats.errors.TimeoutError(), "durable storage in NATS does not answer: nats: timeout"),
    (
        ConnectionRefusedError(111, "refused"),
        "durable storage in NATS does not answer: [Errno 111] refused",
    ),
]


@pytest.mark.parametrize(
    ("failure", "sentence"), SENTENCES, ids=[row[1][-12:] for row in SENTENCES]
)
def test_storage_that_does_not_answer_is_named_with_the_reason(
    failure: Exception, sentence: str
) -> None:
    with pytest.raises(Unavailable) as caught, or_unavailable():
        raise failure
    assert (caught.value.message, caught.value.code) == (sentence, "storage_unavailable")


def test_a_disk_that_is_full_is_named_without_its_folders() -> None:
    full = nats.js.errors.ServerError(
        code=500, err_code=10051, description="write /srv/nats/1.blk: no space left on device"
    )
    with pytest.raises(Unavailable) as caught, or_unavailable():
        raise full
    assert caught.value.code == "storage_full"
    assert "/srv" not in caught.value.message


@pytest.mark.parametrize("pattern", ["b", ">"])
async def test_values_that_are_deleted_after_they_were_counted_are_not_awaited(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Another gateway deletes `b`, or everything, between the count and the first page."""
    name = f"test-{uuid.uuid4().hex}"
    async with Bus.open(nats_url) as bus:
        js = bus.jetstream()
        assert js is not None
        bucket = await js.create_key_value(bucket=name)
        count = JetStreamContext.PullSubscription.consumer_info

        async def count_and_delete(messages: JetStreamContext.PullSubscription) -> ConsumerInfo:
            counted = await count(messages)
            await drop_keys(js, name, pattern)
            return counted

        monkeypatch.setattr(JetStreamContext.PullSubscription, "consumer_info", count_and_delete)
        left = {"a": b"1", "c": b"3"} if pattern == "b" else {}
        for read in ("entries", "sizes"):
            for key, value in (("a", b"1"), ("b", b"2"), ("c", b"3")):
                await bucket.put(key, value)
            if read == "entries":
                found = {entry.key: entry.value async for entry in entries(js, name, ">")}
                assert found == left
            else:
                assert len(await sizes(js, name, ">")) == len(left)
        await js.delete_key_value(name)


@pytest.mark.parametrize("late", [TimeoutError, nats.errors.TimeoutError])
async def test_a_server_that_is_slow_to_answer_is_asked_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, late: type[Exception]
) -> None:
    name = f"test-{uuid.uuid4().hex}"
    fetch = JetStreamContext.PullSubscription.fetch
    num_late = 0

    async def late_once(
        messages: JetStreamContext.PullSubscription, batch: int, timeout: float
    ) -> list[Msg]:
        nonlocal num_late
        num_late += 1
        if num_late == 1:
            raise late
        return await fetch(messages, batch, timeout)

    monkeypatch.setattr(JetStreamContext.PullSubscription, "fetch", late_once)
    async with Bus.open(nats_url) as bus:
        js = bus.jetstream()
        assert js is not None
        bucket = await js.create_key_value(bucket=name)
        await bucket.put("a", b"1")
        assert [entry.value async for entry in entries(js, name, ">")] == [b"1"]
    assert num_late == 2


async def test_marks_of_deleted_values_are_left_out_and_many_values_come_in_order(
    nats_url: str,
) -> None:
    name = f"test-{uuid.uuid4().hex}"
    async with Bus.open(nats_url) as bus:
        js = bus.jetstream()
        assert js is not None
        bucket = await js.create_key_value(bucket=name)
        for i in range(100):
            await bucket.put(f"k.{i}", str(i).encode())
        await bucket.put("k.7", b"again")
        await bucket.delete("k.50")
        found = [(entry.key, entry.value) async for entry in entries(js, name, "k.*")]
        expected = [(f"k.{i}", str(i).encode()) for i in range(100) if i not in (7, 50)]
        assert found == [*expected, ("k.7", b"again")]
        [last] = [entry async for entry in entries(js, name, "k.7")]
        assert last.revision == (await bucket.get("k.7")).revision
        await js.delete_key_value(name)
