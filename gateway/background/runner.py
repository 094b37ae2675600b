"""Computes responses in the background: through the gateway's own surface, as if their clients waited.

Whatever dies on the way, the next run begins anew with the same seed. A run that was overtaken finds another's name on
the record and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog
from starlette.types import ASGIApp

from headwater.gateway import in_process
from headwater.gateway.background.event_log import EventWriter, Overtaken
from headwater.gateway.background.ledger import BackgroundLedger, HeldResponse
from headwater.gateway.background.records import Record
from headwater.gateway.batches.durable import FAILURES, Durable
from headwater.gateway.batches.insist import insist
from headwater.gateway.batches.line_caller import BUSY, MAX_FAULTS, PAUSES
from headwater.gateway.batches.workers import PAUSE_SECONDS, Workers
from headwater.gateway.exchange import KnownRequest
from headwater.gateway.response_store import ResponseStore
from headwater.services.errors import NotFound, Unavailable
from headwater.services.runtime import end

PATH = "/v1/responses"
MAX_RESPONSES = 64
"""That one gateway computes at once."""
LOOK_SECONDS = 0.5
"""Between two looks at whether somebody still wants it."""
FLUSH_SECONDS = 0.1
"""Between two messages of events."""


class Stopped(Exception):
    """It is over, or was cancelled."""


class BackgroundRunner:
    """Use within `running`."""

    def __init__(self, durable: Durable, app: ASGIApp, responses: ResponseStore) -> None:
        self._durable, self._app, self._responses = durable, app, responses
        self._ledger = BackgroundLedger(durable)
        self._workers = Workers(durable, self._ledger.next, self._work, MAX_RESPONSES)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[BackgroundRunner]:
        """Takes responses for the length of a scope; leaving it gives back those that are not done."""
        async with self._workers.running():
            yield self

    async def _work(self, held: HeldResponse) -> None:
        try:
            async with held.held():
                run = _Run(self._durable, self._app, self._responses, held.tenant, held.response_id)
                await run.to_its_end()
            await held.done()
        except asyncio.CancelledError:
            await held.give_back()
            raise
        except (NotFound, Stopped):
            # Deleted or cancelled, or done by a run that died before it said so.
            with contextlib.suppress(*FAILURES):
                await held.done()
        except Overtaken:
            structlog.get_logger().info("response is another runner's", response=held.response_id)
        except (*FAILURES, Unavailable) as failure:
            structlog.get_logger().warning("response interrupted", response=held.response_id, error=repr(failure))
            await held.give_back(PAUSE_SECONDS)


class _Run:
    """One run's work on one response."""

    def __init__(self, durable: Durable, app: ASGIApp, responses: ResponseStore, tenant: str, response_id: str) -> None:
        self._app, self._responses, self._ledger = app, responses, BackgroundLedger(durable)
        self._tenant, self._id = tenant, response_id
        self._name = secrets.token_hex(8)
        self._events = EventWriter(durable, response_id)
        self._last: dict[str, Any] = {}
        """The response of the last event."""
        self._unread = b""

    async def to_its_end(self) -> None:
        record = await insist(lambda: self._ledger.change(self._tenant, self._id, self._claim))
        if record.is_streamed:
            await self._events.catch_up()
        work = asyncio.create_task(self._compute(record))
        watch = asyncio.create_task(self._until_stopped())
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait((work, watch, writing), return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, writing, work):
                if task.done():
                    task.result()
        finally:
            await end(work, watch, writing)

    def _claim(self, record: Record) -> None:
        if record.is_over:
            raise Stopped
        record.owner = self._name
        record.response["status"] = "in_progress"

    def _check_mine(self, record: Record) -> None:
        """What a client has cancelled stays so, and what another run has is that one's to end."""
        if record.is_over:
            raise Stopped
        if record.owner != self._name:
            raise Overtaken

    async def _compute(self, record: Record) -> None:
        try:
            kept = await self._responses.find(self._tenant, self._id)
        except (NotFound, Unavailable):
            response = await self._response(record)
        else:
            # A run before got so far and no further.
            response = kept.response
            self._events.add({"type": f"response.{response['status']}", "response": response})
        if record.is_streamed:
            await insist(self._events.flush)

        def end(each: Record) -> None:
            self._check_mine(each)
            each.end(response)

        if response.get("store") and response["status"] != "failed":
            # It is found among those that are kept.
            await insist(lambda: self._ledger.conclude(self._tenant, self._id, self._check_mine))
        else:
            await insist(lambda: self._ledger.change(self._tenant, self._id, end))

    async def _response(self, record: Record) -> dict[str, Any]:
        """Of a run to the answer's end, whatever that is."""
        reply = await self._answered(record)
        if reply.status == 200:
            return self._last if record.is_streamed else msgspec.json.decode(self._unread, type=dict[str, Any])
        error = msgspec.json.decode(reply.body or b"{}").get("error", {})
        told = {key: error.get(key) for key in ("code", "message")}
        response = record.response | {"status": "failed", "error": told}
        self._events.add({"type": "response.failed", "response": response})
        return response

    async def _answered(self, record: Record) -> in_process.Reply:
        """What cannot be served now is tried again."""
        tries = num_faults = 0
        known = KnownRequest(record.request_id, record.response["created_at"])
        on_body = self._read if record.is_streamed else self._gather
        while True:
            reply = await in_process.call(
                self._app, PATH, record.body, record.tenant, record.priority, known=known, on_body=on_body
            )
            if reply.status not in BUSY:
                num_faults += reply.status >= 500
                if reply.status < 500 or num_faults == MAX_FAULTS:
                    return reply
            await asyncio.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
            tries += 1

    def _gather(self, piece: bytes) -> None:
        self._unread += piece

    def _read(self, piece: bytes) -> None:
        """Events of the stream, without comments."""
        *whole, self._unread = (self._unread + piece).split(b"\n\n")
        for text in whole:
            _, found, data = text.partition(b"data: ")
            if found:
                event = msgspec.json.decode(data)
                self._last = event.get("response", self._last)
                self._events.add(event)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await insist(self._events.flush)

    async def _until_stopped(self) -> None:
        """Raises `Stopped`, `Overtaken`, `NotFound`."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(*FAILURES, Unavailable):
                record = await self._ledger.get(self._tenant, self._id)
                self._check_mine(record)
