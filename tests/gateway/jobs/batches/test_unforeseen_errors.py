"""Batches and lines that fail by unforeseen errors: they are tried a few times, not for ever."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import pytest
import structlog.testing
from prometheus_client import CollectorRegistry

from headwater.gateway.jobs import busy
from headwater.gateway.jobs.batches.files import Files
from headwater.gateway.jobs.batches.ledger import Ledger
from headwater.gateway.jobs.batches.line_caller import LineCaller
from headwater.gateway.jobs.batches.open_batches import OpenBatches
from headwater.gateway.jobs.batches.records import Batch
from headwater.gateway.jobs.batches.results import Results
from headwater.gateway.jobs.batches.runner import Runner
from headwater.gateway.jobs.durable import BATCH_QUEUE, Durable
from headwater.gateway.jobs.tenant_storage import TenantStorage
from headwater.gateway.storage_limits import StorageLimits
from headwater.services.runtime import subjects
from tests.gateway.jobs.batches.test_run import Answering, Bench
from tests.gateway.jobs.test_workers import durable

__all__ = ["durable"]


class BrokenStorage(TenantStorage):
    """Fails when a run asks for room."""

    num_asked = 0

    async def left(self, tenant: str, *, without: str = "") -> int:
        self.num_asked += 1
        raise ValueError("unforeseen")


class BrokenFor(Answering):
    """Fails for one prompt, and is busy with another one for some time."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        prompt = msgspec.json.decode(message["body"])["prompt"]
        if prompt == "p1":
            self.asked.append(prompt)
            raise ValueError("unforeseen")
        if prompt == "p2":
            self.statuses = [429] if self.asked.count("p2") < 7 else []

        async def again() -> Any:
            return message

        await super().__call__(scope, again, send)


@pytest.fixture
async def bench(durable: Durable, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Storage on a NATS server of its own, whose queues hold no batches of other tests."""
    monkeypatch.setattr(busy, "FIRST_REST_SECONDS", 0.001)
    monkeypatch.setattr("headwater.gateway.jobs.batches.line_caller.PAUSES", (0.001,))
    return Bench(durable, Files(durable), Ledger(durable), Results(durable), uuid.uuid4().hex)


async def ended(bench: Bench, batch_id: str) -> Batch:
    async with asyncio.timeout(60):
        while not (batch := (await bench.ledger.get(bench.tenant, batch_id)).batch).is_over:  # noqa: ASYNC110 (a client)
            await asyncio.sleep(0.02)
    return batch


async def test_a_batch_whose_runs_fail_five_times_fails(bench: Bench) -> None:
    kept = await bench.batch(3)
    storage = BrokenStorage(bench.durable, StorageLimits())
    caller = LineCaller(Answering(), concurrency=2, registry=CollectorRegistry())
    with structlog.testing.capture_logs() as lines:
        async with Runner(storage, caller, max_line_bytes=1000).running():
            batch = await ended(bench, kept.batch.id)
            rooms = await bench.durable.rooms()
            async with asyncio.timeout(60):
                while (await rooms.js.stream_info(BATCH_QUEUE)).state.messages:  # noqa: ASYNC110 (NATS sends no event)
                    await asyncio.sleep(0.02)
    assert (batch.status, storage.num_asked) == ("failed", 5)
    assert batch.errors is not None
    assert [(fault.code, fault.message) for fault in batch.errors.data] == [
        ("internal_error", "the batch failed 5 times by an internal fault; the log has it")
    ]
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["work failed"] * 5


async def test_a_line_that_fails_five_times_has_that_as_its_result_and_those_beside_it_have_theirs(
    bench: Bench,
) -> None:
    app = BrokenFor()
    async with asyncio.timeout(60):
        batch = await bench.outcome(await bench.batch(4), app)
    assert (batch.status, app.asked.count("p1"), app.asked.count("p2")) == ("completed", 5, 8)
    assert {line["custom_id"] for line in await bench.lines(batch.output_file_id)} == {
        "0",
        "2",
        "3",
    }
    [line] = await bench.lines(batch.error_file_id)
    assert (line["custom_id"], line["response"]) == ("1", None)
    assert line["error"] == {
        "code": "internal_error",
        "message": "it failed 5 times by an internal fault; the log has it",
    }


async def test_a_range_of_a_batch_that_cannot_be_opened_learns_why(bench: Bench) -> None:
    """A cancelled wait would give the range back at once, again and again."""
    kept = await bench.batch(1)
    await (await bench.ledger.bucket()).put(
        f"{subjects.key_of(bench.tenant)}.{kept.batch.id}", b"unreadable"
    )
    async with OpenBatches(bench.files, bench.ledger).running() as batches:
        with pytest.raises(msgspec.DecodeError):
            async with batches.used(bench.tenant, kept.batch.id):
                pass
