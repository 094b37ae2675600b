"""One run's work on one background response."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import secrets
import time
from typing import Any

import msgspec
from starlette.types import ASGIApp

from headwater.services.runtime.errors import (
    InternalError,
    NotFound,
    StorageLimitExceeded,
    Unavailable,
)
from headwater.services.runtime.tasks import end

from ...buckets import FAILURES, Overtaken
from ...request.stream_failure import TakenOver
from .. import in_process
from ..busy import MAX_FAULTS, PATIENCE, PAUSES, Busy, is_busy
from ..in_process import KnownRequest
from ..response_store import ResponseStore
from ..retry import retry
from ..tenant_storage import TenantStorage
from ..workers import MAX_ERRORS
from .events import EventWriter
from .ledger import BackgroundLedger
from .records import OVER, Record

PATH = "/v1/responses"
STREAMS = "/v1/streams"
RESUME_SECONDS = 20.0
"""Seconds that a run tries to resume the stream of the one before: longer than output processors
keep it."""
LOOK_SECONDS = 0.5
"""Seconds between two checks whether a response is still wanted."""
FLUSH_SECONDS = 0.1
"""Seconds between two messages of events."""
CHECK_BYTES = 64 * 1024
CHECK_SECONDS = 10.0
"""Number of bytes of events, and of seconds with new ones, after which the run checks that the
tenant has room for them."""


class Stopped(Exception):
    """The response is over, or was cancelled."""


class Run:
    """One run, from taking the record to the last event."""

    def __init__(
        self,
        storage: TenantStorage,
        app: ASGIApp,
        responses: ResponseStore,
        tenant: str,
        response_id: str,
        *,
        patience: int = PATIENCE,
    ) -> None:
        """`patience` is the number of tries of a request that cannot be served now."""
        self._storage = storage
        self._app = app
        self._responses = responses
        self._ledger = BackgroundLedger(storage.durable)
        self._tenant = tenant
        self._id = response_id
        self._patience = patience
        self._name = secrets.token_hex(8)
        self._events = EventWriter(storage.durable, tenant, response_id)
        self._resumes_until = 0.0
        """Time on the loop's clock until which the stream may be resumed; 0 once it is not any
        more."""
        self._record: Record | None = None
        self._last: dict[str, Any] = {}
        """The response in the last event."""
        self._unread = b""
        self._is_overtaken = self._is_answered = False
        self._checked_at = -math.inf
        self._num_checked = 0
        """Time of the last check for room, and the number of bytes of events that it covered."""

    async def to_its_end(self) -> None:
        """Computes the response. Raises `Busy` where it cannot be served now, `Stopped`,
        `Overtaken`, `NotFound`, and what storage raises."""
        record = self._record = await retry(
            lambda: self._ledger.change(self._tenant, self._id, self._claim)
        )
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
        except Busy:
            await retry(lambda: self._ledger.change(self._tenant, self._id, self._release))
            raise
        except StorageLimitExceeded as refusal:
            await end(work, watch)
            await self._events.discard()
            await self._fail(record, refusal.code, refusal.message)
        finally:
            await end(work, watch, writing)

    async def count_error(self) -> bool:
        """Counts a run that ended by an unforeseen error; the last allowed one ends the response.
        Returns whether the response has ended."""

        def count(record: Record) -> None:
            if record.is_over:
                raise Stopped
            record.num_errors += 1
            if record.num_errors >= MAX_ERRORS:
                record.owner = self._name

        try:
            record = self._record = await retry(
                lambda: self._ledger.change(self._tenant, self._id, count)
            )
            if record.num_errors < MAX_ERRORS:
                return False
            await self._events.catch_up()
            message = f"the response failed {MAX_ERRORS} times by an internal fault; the log has it"
            await self._fail(record, InternalError.code, message)
        except (NotFound, Stopped):
            # The response was deleted or cancelled.
            pass
        return True

    async def _fail(self, record: Record, code: str, message: str) -> None:
        """Ends the response by an error."""
        response = _failed(record, code, message)
        if record.is_streamed:
            self._events.add({"type": "response.failed", "response": response})
            await retry(self._events.flush)
        await self._end(response)

    async def _end(self, response: dict[str, Any]) -> None:
        def end(each: Record) -> None:
            self._check_mine(each)
            each.end(response)

        await retry(lambda: self._ledger.change(self._tenant, self._id, end))

    async def forget(self) -> None:
        """Drops the stream, which no reader resumes any more."""
        if self._record is not None:
            await self._call("DELETE", f"{STREAMS}/{self._record.request_id}", b"")

    def _claim(self, record: Record) -> None:
        if record.is_over:
            raise Stopped
        if record.owner:
            self._resumes_until = asyncio.get_running_loop().time() + RESUME_SECONDS
        record.owner = self._name
        record.response["status"] = "in_progress"

    def _release(self, record: Record) -> None:
        """Puts the response back. The next run looks for no stream, which a refused request does
        not have."""
        self._check_mine(record)
        record.owner = ""
        record.response["status"] = "queued"

    def _check_mine(self, record: Record) -> None:
        """Raises `Stopped` for a cancelled response, `Overtaken` for one that another run has
        taken."""
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
            # An earlier run got to this point.
            response = kept.response
            self._events.add({"type": f"response.{response['status']}", "response": response})
        self._is_answered = True
        if record.is_streamed:
            await self._write_end(response)
        if response.get("store") and response["status"] != "failed":
            # A kept response is found by its id.
            await retry(lambda: self._ledger.conclude(self._tenant, self._id, self._check_mine))
        else:
            await self._end(response)

    async def _response(self, record: Record) -> dict[str, Any]:
        """Response of a run, up to the answer's end. Raises `Overtaken`, `Busy`."""
        reply = await self._answered(record)
        if self._is_overtaken:
            raise Overtaken
        if reply.status == 200:
            if self._last.get("status") not in OVER:
                raise InternalError("the response's stream ended before its last event")
            return self._last
        error = msgspec.json.decode(reply.body or b"{}").get("error", {})
        response = _failed(record, error.get("code"), error.get("message"))
        self._events.add({"type": "response.failed", "response": response})
        return response

    async def _answered(self, record: Record) -> in_process.Reply:
        """Reply of the stream that gives the answer. Tries again answers that failed before their
        client got anything, and requests that cannot be served now, the latter a few times. Raises
        `Busy`."""
        tries = num_faults = num_refusals = 0
        while True:
            self._unread = b""
            reply = await self._asked(record)
            has_failed = (
                reply.status == 200
                and not record.is_streamed
                and self._last.get("status") == "failed"
            )
            if not is_busy(reply):
                num_faults += reply.status >= 500 or has_failed
                if (
                    (reply.status < 500 and not has_failed)
                    or num_faults == MAX_FAULTS
                    or self._is_overtaken
                ):
                    return reply
            elif not self._resumes_until and (num_refusals := num_refusals + 1) >= self._patience:
                raise Busy
            await asyncio.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
            tries += 1

    async def _asked(self, record: Record) -> in_process.Reply:
        """Reply with the stream of an earlier run, for as long as it may be kept; else with a new
        one."""
        if asyncio.get_running_loop().time() < self._resumes_until:
            reply = await self._call("GET", f"{STREAMS}/{record.request_id}", b"")
            if reply.status != 404:
                return reply
        self._resumes_until = 0.0
        return await self._call("POST", PATH, record.body)

    async def _call(self, method: str, path: str, body: bytes) -> in_process.Reply:
        record = self._record
        assert record is not None
        known = KnownRequest(record.request_id, record.response["created_at"])
        on_body = self._read if method != "DELETE" else None
        return await in_process.call(
            self._app,
            path,
            body,
            record.tenant,
            record.priority,
            method=method,
            known=known,
            on_body=on_body,
        )

    def _read(self, piece: bytes) -> None:
        """Reads the events in a piece of the stream, without comments, up to an event that says
        that another reader took the stream over."""
        *whole, self._unread = (self._unread + piece).split(b"\n\n")
        for text in whole:
            _, found, data = text.partition(b"data: ")
            if not found or self._is_overtaken:
                continue
            event = msgspec.json.decode(data)
            self._is_overtaken = event["type"] == "error" and event.get("code") == TakenOver.code
            if self._is_overtaken:
                return
            self._last = event.get("response", self._last)
            if self._record is not None and self._record.is_streamed:
                self._events.add(event)

    async def _write(self) -> None:
        """Writes events until the answer is whole. Raises `StorageLimitExceeded` when the tenant
        has no room for more."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            num_events = self._events.num_waiting
            try:
                await self._check_room()
            except StorageLimitExceeded:
                if not self._is_answered:
                    raise
            if not self._is_answered:
                # Only events that the tenant has room for are written.
                await retry(functools.partial(self._events.flush, num_events))

    async def _check_room(self) -> None:
        """Checks that the tenant has room for the events that were added meanwhile. Raises
        `StorageLimitExceeded`."""
        num_bytes = self._events.num_bytes
        now = time.monotonic()
        num_new = num_bytes - self._num_checked
        if num_new > CHECK_BYTES or (num_new > 0 and now - self._checked_at > CHECK_SECONDS):
            await retry(
                lambda: self._storage.check_events(self._tenant, self._events.num_waiting_bytes)
            )
            self._checked_at = now
            self._num_checked = num_bytes

    async def _write_end(self, response: dict[str, Any]) -> None:
        """Writes the events that are left; where there is no room, only the last one, which has the
        whole answer."""
        try:
            await self._check_room()
        except StorageLimitExceeded:
            await self._events.discard()
            self._events.add({"type": f"response.{response['status']}", "response": response})
        await retry(self._events.flush)

    async def _until_stopped(self) -> None:
        """Waits until the response is stopped. Raises `Stopped`, `Overtaken`, `NotFound`."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(*FAILURES, Unavailable):
                record = await self._ledger.get(self._tenant, self._id)
                if not self._is_answered:
                    # The end that this run writes is no stop.
                    self._check_mine(record)


def _failed(record: Record, code: str | None, message: str | None) -> dict[str, Any]:
    return record.response | {"status": "failed", "error": {"code": code, "message": message}}
