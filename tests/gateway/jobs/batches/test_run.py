"""What runs of batches owe to one another, over a real JetStream; what answers the lines is a small
application."""

from __future__ import annotations

import asyncio
import contextlib
import io
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from headwater.gateway.jobs.batches.files import Files
from headwater.gateway.jobs.batches.ledger import Ledger
from headwater.gateway.jobs.batches.line_caller import LineCaller
from headwater.gateway.jobs.batches.open_batches import OpenBatches
from headwater.gateway.jobs.batches.range_runner import RangeRunner
from headwater.gateway.jobs.batches.ranges import LINES
from headwater.gateway.jobs.batches.records import Batch, Kept, Result, new_id, now
from headwater.gateway.jobs.batches.results import Results
from headwater.gateway.jobs.batches.run import NotMine, Run
from headwater.gateway.jobs.durable import Durable
from headwater.gateway.jobs.tenant_storage import TenantStorage
from headwater.gateway.storage_limits import StorageLimits
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import BadRequest, NotFound, Unavailable

URL = "/v1/completions"


class Answering:
    """Answers each line by its prompt, after `gate`; the first answers are the given statuses, and
    it is `busy` for those whose prompts begin so."""

    busy = "never"
    code = "rate_limit_exceeded"
    times = 1

    def __init__(self, *statuses: int, num_answers: int = 1000) -> None:
        self.num_answers = num_answers
        """Before the gate closes."""
        self.statuses = list(statuses)
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = msgspec.json.decode((await receive())["body"])
        self.headers = dict(scope["headers"])
        self.asked.append(body["prompt"])
        if len(self.asked) > self.num_answers:
            self.gate.clear()
        self.begun.set()
        await self.gate.wait()
        status = (
            self.statuses.pop(0)
            if self.statuses
            else 429
            if body["prompt"].startswith(self.busy)
            else 200
        )
        answer: dict[str, Any] = {"text": body["prompt"] * self.times}
        if status == 429:
            answer = {"error": {"code": self.code}}
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"x-request-id", b"r1")]}
        )
        await send({"type": "http.response.body", "body": msgspec.json.encode(answer)})


@dataclass
class Bench:
    durable: Durable
    files: Files
    ledger: Ledger
    results: Results
    tenant: str
    limits: StorageLimits = field(default_factory=StorageLimits)

    @property
    def storage(self) -> TenantStorage:
        return TenantStorage(self.durable, self.limits)

    async def batch(
        self, num_lines: int, *, expires_in: int = 3600, prompt: str = "p", more: bytes = b""
    ) -> Kept:
        lines = [
            {"custom_id": f"{i}", "method": "POST", "url": URL, "body": {"prompt": f"{prompt}{i}"}}
            for i in range(num_lines)
        ]
        content = b"".join(msgspec.json.encode(each) + b"\n" for each in lines) + more
        file = await self.files.add(
            self.tenant, "in.jsonl", "batch", io.BytesIO(content), len(content)
        )
        batch = Batch(
            id=new_id("batch_"),
            endpoint=URL,
            input_file_id=file.id,
            completion_window="1h",
            created_at=now(),
            expires_at=now() + expires_in,
        )
        kept = Kept(batch=batch, tenant=self.tenant, weight=1.0, tier=2)
        await self.ledger.add(kept)
        return kept

    def run(self, kept: Kept) -> Run:
        return Run(self.storage, kept.tenant, kept.batch.id, max_line_bytes=1000)

    def answered_by(self, app: Answering) -> contextlib.AbstractAsyncContextManager[RangeRunner]:
        """A gateway that answers lines for the length of a scope."""
        return RangeRunner(
            self.durable, LineCaller(app, concurrency=2, registry=CollectorRegistry())
        ).running()

    async def outcome(self, kept: Kept, app: Answering) -> Batch:
        async with self.answered_by(app):
            return await self.run(kept).to_its_end()

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        async with self.files.opened(self.tenant, file_id) as content:
            return [msgspec.json.decode(line) for line in content]


@pytest.fixture
async def bench(nats_url: str) -> AsyncIterator[Bench]:
    async with Bus.open(nats_url) as bus:
        durable = Durable(bus)
        yield Bench(durable, Files(durable), Ledger(durable), Results(durable), uuid.uuid4().hex)


async def test_a_line_that_cannot_be_served_now_is_tried_again_behind_everyone_else(
    bench: Bench,
) -> None:
    kept = await bench.batch(1)
    app = Answering(503, 429, 500)
    batch = await bench.outcome(kept, app)
    assert (batch.status, app.asked) == ("completed", ["p0"] * 4)
    assert app.headers[b"x-priority"] == b"1000"
    (line,) = await bench.lines(batch.output_file_id)
    assert (line["response"]["request_id"], line["response"]["body"]) == ("r1", {"text": "p0"})


async def test_a_fault_that_stays_is_the_lines_result(bench: Bench) -> None:
    kept = await bench.batch(1)
    app = Answering(500, 500, 504, 500)
    batch = await bench.outcome(kept, app)
    assert (batch.status, batch.request_counts.failed, batch.output_file_id) == (
        "completed",
        1,
        None,
    )
    (line,) = await bench.lines(batch.error_file_id)
    assert (line["response"]["status_code"], len(app.asked)) == (504, 3)


async def test_a_run_that_is_overtaken_stops_and_nothing_of_it_is_seen(bench: Bench) -> None:
    kept = await bench.batch(6)
    app = Answering()
    app.gate.clear()
    async with bench.answered_by(app):
        first = asyncio.create_task(bench.run(kept).to_its_end())
        await app.begun.wait()
        second = asyncio.create_task(bench.run(kept).to_its_end())
        with pytest.raises(NotMine):
            await first
        app.gate.set()
        batch = await second
    assert batch.status == "completed"
    assert sorted(app.asked) == [f"p{i}" for i in range(6)]
    assert sorted(line["custom_id"] for line in await bench.lines(batch.output_file_id)) == [
        f"{i}" for i in range(6)
    ]
    stored = (await bench.ledger.get(bench.tenant, batch.id)).batch
    assert stored.output_file_id == batch.output_file_id
    outputs = [
        file for file in await bench.files.all(bench.tenant) if file.purpose == "batch_output"
    ]
    assert [file.id for file in outputs] == [batch.output_file_id]


async def test_several_gateways_answer_the_lines_of_one_batch_each_once(bench: Bench) -> None:
    kept = await bench.batch(6 * LINES + 3)
    apps = [Answering(), Answering()]
    for app in apps:
        app.gate.clear()
    async with bench.answered_by(apps[0]), bench.answered_by(apps[1]):
        run = asyncio.create_task(bench.run(kept).to_its_end())
        for app in apps:
            # Neither gets on before both have lines.
            await app.begun.wait()
        for app in apps:
            app.gate.set()
        batch = await run
    assert (batch.status, batch.request_counts.completed) == ("completed", 6 * LINES + 3)
    assert sorted(apps[0].asked + apps[1].asked) == sorted(f"p{i}" for i in range(6 * LINES + 3))
    answered = [line["custom_id"] for line in await bench.lines(batch.output_file_id)]
    assert sorted(map(int, answered)) == list(range(6 * LINES + 3))


async def test_a_batch_ends_where_its_tenant_may_keep_no_more(bench: Bench) -> None:
    kept = await bench.batch(200)
    limited = replace(
        bench, limits=StorageLimits(for_files=await bench.storage.of(bench.tenant) + 3000)
    )
    # The others are not answered before the batch has no room left.
    batch = await limited.outcome(kept, Answering(num_answers=100))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.completed + counts.failed, counts.failed > 0, counts.completed > 0) == (
        200,
        True,
        True,
    )
    codes = {line["error"]["code"] for line in await bench.lines(batch.error_file_id)}
    assert codes == {"storage_limit_exceeded"}


async def test_a_run_goes_on_from_the_results_of_the_one_before(bench: Bench) -> None:
    kept = await bench.batch(40)
    first = Answering(num_answers=10)
    second = Answering()
    run = asyncio.create_task(bench.run(kept).to_its_end())
    async with bench.answered_by(first), bench.results.followed(kept.batch.id) as follower:
        num_kept = 0
        while num_kept < 10:
            num_kept += len(await follower.more(1.0))
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    batch = await bench.outcome(kept, second)
    assert (batch.status, batch.request_counts.completed) == ("completed", 40)
    assert len(second.asked) == 30


async def test_lines_not_answered_in_the_window_are_reported_as_expired(bench: Bench) -> None:
    kept = await bench.batch(4, expires_in=1)
    app = Answering()
    app.gate.clear()
    batch = await bench.outcome(kept, app)
    assert (batch.status, batch.output_file_id, batch.request_counts.failed) == ("expired", None, 4)
    assert {line["error"]["code"] for line in await bench.lines(batch.error_file_id)} == {
        "batch_expired"
    }


async def test_a_file_that_is_gone_fails_the_batch(bench: Bench) -> None:
    kept = await bench.batch(1)
    await bench.files.delete(bench.tenant, kept.batch.input_file_id)
    batch = await bench.outcome(kept, Answering())
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data[0].code == "invalid_input_file"


async def test_the_first_result_of_a_line_stands(bench: Bench) -> None:
    batch_id = new_id("batch_")
    assert await bench.results.keep(batch_id, 7, Result(id="one", custom_id="a"))
    assert not await bench.results.keep(batch_id, 7, Result(id="other", custom_id="a"))
    (kept,) = [line async for _, line, _ in bench.results.all(batch_id)]
    assert msgspec.json.decode(kept)["id"] == "one"
    await bench.results.drop(batch_id)
    assert [line async for line in bench.results.all(batch_id)] == []


async def test_changes_of_a_batch_at_once_are_all_made(bench: Bench) -> None:
    kept = await bench.batch(1)

    def count(each: Kept) -> None:
        each.batch.request_counts.total += 1

    await asyncio.gather(
        *(bench.ledger.change(bench.tenant, kept.batch.id, count) for _ in range(10))
    )
    assert (await bench.ledger.get(bench.tenant, kept.batch.id)).batch.request_counts.total == 10
    with pytest.raises(NotFound):
        await bench.ledger.get("somebody else", kept.batch.id)

    def refuse(each: Kept) -> None:
        raise BadRequest("status", "no")

    with pytest.raises(BadRequest):
        await bench.ledger.change(bench.tenant, kept.batch.id, refuse)


async def test_a_batch_that_is_cancelled_before_it_runs_sends_no_request(bench: Bench) -> None:
    kept = await bench.batch(3)
    app = Answering()
    await bench.ledger.change(
        bench.tenant, kept.batch.id, lambda each: each.batch.become("cancelling")
    )
    batch = await bench.outcome(kept, app)
    assert (batch.status, app.asked, batch.request_counts.failed) == ("cancelled", [], 3)


async def test_an_answer_that_no_message_holds_is_kept_all_the_same(bench: Bench) -> None:
    kept = await bench.batch(2)
    app = Answering()
    app.times = 1 << 20
    async with asyncio.timeout(60):
        batch = await bench.outcome(kept, app)
    assert (batch.status, len(app.asked)) == ("completed", 2)
    lines = {
        line["custom_id"]: line["response"]["body"]
        for line in await bench.lines(batch.output_file_id)
    }
    assert lines == {"0": {"text": "p0" * app.times}, "1": {"text": "p1" * app.times}}


async def test_lines_that_cannot_be_served_now_keep_no_place_from_those_that_can(
    bench: Bench,
) -> None:
    stuck = await bench.batch(3 * LINES, prompt="later")
    app = Answering()
    app.busy = "later"
    async with asyncio.timeout(60), bench.answered_by(app):
        waiting = asyncio.create_task(bench.run(stuck).to_its_end())
        await app.begun.wait()
        batch = await bench.run(await bench.batch(3)).to_its_end()
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)
        app.busy = "never"
        batch = await waiting
    assert (batch.status, batch.request_counts.completed) == ("completed", 3 * LINES)


@pytest.mark.parametrize("code", ["insufficient_quota", "limit_too_low"])
async def test_a_limit_that_no_waiting_helps_against_is_a_lines_result(
    bench: Bench, code: str
) -> None:
    kept = await bench.batch(1)
    app = Answering(429)
    app.code = code
    batch = await bench.outcome(kept, app)
    assert (batch.status, batch.request_counts.failed, len(app.asked)) == ("completed", 1, 1)


async def test_a_line_that_nests_too_deep_is_reported_like_other_invalid_lines(
    bench: Bench,
) -> None:
    deep = b'{"custom_id": "d", "method": "POST", "url": "%b", "body": {"prompt": %b}}' % (
        URL.encode(),
        b"[" * 5000 + b"]" * 5000,
    )
    kept = await bench.batch(1, more=deep)
    run = Run(bench.storage, kept.tenant, kept.batch.id, max_line_bytes=100_000)
    batch = await run.to_its_end()
    assert batch.errors is not None
    assert [(fault.code, fault.line) for fault in batch.errors.data] == [("invalid_json_line", 2)]


async def test_a_message_that_is_no_work_stops_no_worker(bench: Bench) -> None:
    rooms = await bench.durable.rooms()
    await rooms.js.publish(subjects.batch_lines("nobody", "1"), b"no range")
    await rooms.js.publish(subjects.BATCH_JOBS, b"no job")
    kept = await bench.batch(1)
    while (await bench.ledger.next_job()).batch_id != kept.batch.id:
        # Other tests leave theirs.
        pass
    assert (await bench.outcome(kept, Answering())).status == "completed"


def test_a_batch_is_paid_for_with_the_key_that_it_came_with() -> None:
    tenant = Tenant(id="ada", weight=2.0, tier=1, key_id="k1", shared_cache=True)
    batch = Batch(
        id="b", endpoint=URL, input_file_id="f", completion_window="1h", created_at=0, expires_at=0
    )
    kept = msgspec.json.decode(msgspec.json.encode(Kept.of(batch, tenant)), type=Kept)
    assert kept.payer == tenant


@pytest.mark.parametrize(
    ("status", "refusal"),
    [("validating", Unavailable), ("cancelling", NotFound), ("completed", NotFound)],
)
async def test_a_range_of_a_batch_that_does_not_run_is_no_unforeseen_error(
    bench: Bench, status: str, refusal: type[Exception]
) -> None:
    """A gateway takes it before the batch's runner has dropped it."""
    kept = await bench.batch(1)

    def become(kept: Kept) -> None:
        kept.batch.status = status

    await bench.ledger.change(kept.tenant, kept.batch.id, become)
    async with OpenBatches(bench.files, bench.ledger).running() as batches:
        with pytest.raises(refusal):
            async with batches.used(kept.tenant, kept.batch.id) as batch:
                batch.content.read()
