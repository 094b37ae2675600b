"""Calls to stages that fail leave nothing to the collector of garbage, which looks seldom in a
process that serves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from headwater.gateway.request import resumed
from headwater.gateway.request.cold_start_queue import ColdStartQueue
from headwater.gateway.stages import processors
from headwater.gateway.stages.processors import Processor, Processors
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime.errors import HeadwaterError, Unavailable
from headwater.services.runtime.fair_threads import STAGE_BUSY
from headwater.services.runtime.rare_log import RareLog
from tests.gateway.request.test_cold_start_queue import MODEL, There


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Body:
    """What a request holds."""


async def gone(_: Any = None) -> Any:
    raise Unavailable("the stage is gone")


def processors_of(num_lost: int) -> Processors:
    """Processors that serve the model, and are lost."""
    pool = Processors()
    there = SimpleNamespace(is_open=True)
    for i in range(num_lost):
        channel = cast("Any", SimpleNamespace(asks_for_proof=False))
        stub = cast("Any", None)
        session = cast("Any", there)
        pool._pool[str(i)] = Processor(
            str(i), channel, stub, session, models={MODEL: cast("Any", None)}
        )
    return pool


async def to_processors(body: Body, num_lost: int) -> None:
    await processors_of(num_lost)._call(MODEL, lambda _, body=body: gone(body))


async def to_no_output_processor(body: Body) -> None:
    outputs = SimpleNamespace(in_order_for=lambda _: [body], is_whole=True)
    cluster = cast("Any", SimpleNamespace(stages=SimpleNamespace(outputs=outputs)))
    await resumed._ask_outputs(cluster, "an id", gone)


async def to_a_replica_that_cannot_start(body: Body) -> None:
    there = There()
    there.receive(problem="no memory", retry_seconds=9)

    async def waits(queue: ColdStartQueue, _: Body) -> None:
        await queue.replica(MODEL, tenant=Tenant(id="open"), tier=0, virtual_time=0.0)

    await waits(there.demand, body)


CALLS: dict[str, Callable[[Body], Awaitable[None]]] = {
    "no processor comes": lambda body: to_processors(body, 1),
    "too many processors are lost": lambda body: to_processors(body, processors.MOST_LOST),
    "no output processor has the stream": to_no_output_processor,
    "no replica can start": to_a_replica_that_cannot_start,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_failed_call_keeps_no_reference_to_its_request(
    call: Callable[[Body], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "RETURN_SECONDS", 0.0)

    async def request() -> weakref.ref[Body]:
        body = Body()
        try:
            await call(body)
        except HeadwaterError:
            return weakref.ref(body)
        raise AssertionError("the call did not fail")

    left = await asyncio.create_task(request())
    assert left() is None


async def test_calls_to_processors_that_are_lost_write_a_line_a_minute_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "RETURN_SECONDS", 0.0)
    monkeypatch.setattr(processors, "_rare_log", RareLog(lambda: 0.0))
    with capture_logs() as lines:
        for _ in range(20):
            with contextlib.suppress(HeadwaterError):
                await to_processors(Body(), 2)
    addresses = [each["address"] for each in lines if each["event"] == "processor out of reach"]
    assert sorted(addresses) == ["0", "1"]


async def test_a_request_that_waited_too_long_at_one_processor_waits_at_no_other_one() -> None:
    asked = []

    async def busy(processor: Processor) -> Any:
        asked.append(processor.address)
        raise Unavailable("no turn came", retry_after=8.0, code=STAGE_BUSY)

    with pytest.raises(Unavailable, match="no turn came") as refused:
        await processors_of(2)._call(MODEL, busy)
    assert refused.value.retry_after == 8.0
    assert len(asked) == 1
