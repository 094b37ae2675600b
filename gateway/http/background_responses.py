"""Responses with `background` over HTTP: asked for, polled, streamed from any event on,
cancelled."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import msgspec

from headwater.services.runtime.errors import (
    BadRequest,
    BodyTooLarge,
    HeadwaterError,
    NotFound,
    Unavailable,
)

from ..buckets import FAILURES, Overtaken, or_unavailable
from ..jobs.background.events import EventWriter, follow, log_of
from ..jobs.background.ledger import BackgroundLedger
from ..jobs.background.records import Record
from ..jobs.tenant_storage import TenantStorage
from ..openai.errors import response_error
from ..openai.response_schema import ResponsesRequest
from ..tenancy.caller import Caller
from ..tenancy.tenants import Tenants
from ..wire.sse import KEEP_ALIVE
from .http_exchange import Exchange
from .responses import Responses

MAX_BODY_BYTES = 256 * 1024
"""Bytes of a request, which is kept until it is answered."""
MAX_EVENT = 2**53


class BackgroundResponses:
    """The handlers. `keep_alive` is the silence in seconds after which a stream gets a comment."""

    def __init__(
        self, storage: TenantStorage, responses: Responses, tenants: Tenants, keep_alive: float
    ) -> None:
        self._storage = storage
        self._durable = storage.durable
        self._responses = responses
        self._tenants = tenants
        self._keep_alive = keep_alive
        self._ledger = BackgroundLedger(storage.durable)

    async def create(
        self, exchange: Exchange, caller: Caller, asked: ResponsesRequest, body: bytes
    ) -> None:
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(MAX_BODY_BYTES)
        caller = caller.with_body(asked.request_id, asked.priority)
        exchange.request_id = caller.shown_id
        async with caller.within_deadline():
            answer = await self._responses.queued(caller, asked)
        response = answer.response("queued")
        record = Record(
            tenant=caller.tenant,
            priority=caller.priority,
            request_id=caller.request_id,
            body=_with_seed(body, asked.seed),
            is_streamed=bool(asked.stream),
            response=response,
        )
        with or_unavailable():
            tenant = caller.tenant.key
            first = []
            if record.is_streamed:
                first = [{"type": f"response.{kind}", "response": response} for kind in _BEGINNING]
            num_event_bytes = sum(len(msgspec.json.encode(event)) for event in first)
            room = self._storage.room_in_background(
                tenant, len(record.body), num_event_bytes=num_event_bytes
            )
            async with room:
                if first:
                    await self._append_event(tenant, record.id, *first)
                await self._ledger.add(record)
        if record.is_streamed:
            await self._stream(exchange, caller, record.id, after=-1)
        else:
            await exchange.reply_json(response)

    async def retrieve(self, exchange: Exchange, caller: Caller) -> None:
        response_id = exchange.path_params["id"]
        query = exchange.query
        stream = query.get("stream", "false")
        if stream.lower() not in ("true", "false"):
            raise BadRequest.of("stream", stream, "true or false")
        if stream.lower() == "false":
            if "starting_after" in query:
                raise BadRequest(
                    "starting_after", "starting_after without stream; allowed: with stream=true"
                )
            await exchange.reply_json(await self._found(caller, response_id))
            return
        after = query.get("starting_after", "-1")
        if after != "-1" and not (
            after.isascii() and after.isdigit() and len(after) <= 16 and int(after) <= MAX_EVENT
        ):
            raise BadRequest.of("starting_after", after, "the sequence_number of an event")
        response = await self._found(caller, response_id)
        with or_unavailable():
            if (
                not response.get("background")
                or await log_of(self._durable, caller.tenant.key, response_id).is_empty()
            ):
                allowed = "for responses with background and stream, while their events are kept"
                raise BadRequest("stream", f"stream is true; allowed: {allowed}")
        await self._stream(exchange, caller, response_id, after=int(after))

    async def cancel(self, exchange: Exchange, caller: Caller) -> None:
        """Marks the response as cancelled; the gateway that computes it reads the mark and
        stops."""
        tenant = caller.tenant.key
        response_id = exchange.path_params["id"]
        with or_unavailable():
            try:
                record = await self._ledger.change(tenant, response_id, _cancel)
            except NotFound:
                response = await self._found(caller, response_id)
                if not response.get("background"):
                    raise BadRequest(
                        "id", "the response has no background; allowed: one that has"
                    ) from None
                # The response ended before it could be cancelled.
                await exchange.reply_json(response)
                return
            if record.is_streamed and record.response["status"] == "cancelled":
                await self._append_event(
                    tenant, response_id, {"type": "response.cancelled", "response": record.response}
                )
        await exchange.reply_json(record.response)

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        """Deletes a running or a kept response."""
        tenant = caller.tenant.key
        response_id = exchange.path_params["id"]
        record = await self._here(tenant, response_id)
        try:
            if record is None:
                raise NotFound("response", response_id)
            with or_unavailable():
                await self._ledger.drop(tenant, response_id)
        except NotFound:
            try:
                await self._responses.forget(tenant, response_id)
            except NotFound:
                await self._running(tenant, response_id)
                raise
            record = None
        with contextlib.suppress(*FAILURES, Unavailable):
            if record is not None and record.is_streamed and not record.is_over:
                gone = record.response | {"status": "cancelled"}
                # Readers of the stream get the event if there is room for it.
                last = {"type": "response.cancelled", "response": gone}
                await self._append_event(tenant, response_id, last, in_place_of_all=True)
            else:
                await log_of(self._durable, tenant, response_id).drop()
        await exchange.reply_json({"id": response_id, "object": "response", "deleted": True})

    async def _found(self, caller: Caller, response_id: str) -> dict[str, Any]:
        """The running or kept response. Raises `NotFound`, `Unavailable`."""
        tenant = caller.tenant.key
        if (record := await self._here(tenant, response_id)) is None:
            try:
                return await self._responses.find(tenant, response_id)
            except NotFound:
                record = await self._running(tenant, response_id)
        return record.response

    async def _here(self, tenant: str, response_id: str) -> Record | None:
        """The record of a response; None also where there is no NATS, or none that answers: a kept
        response is found without it."""
        if not self._durable.is_there:
            return None
        try:
            return await self._ledger.get(tenant, response_id)
        except (*FAILURES, NotFound, Unavailable):
            return None

    async def _running(self, tenant: str, response_id: str) -> Record:
        """The record of a response that is not kept. Raises `NotFound`, and `Unavailable` while
        NATS is away: the response may run."""
        if not self._durable.has_server:
            raise NotFound("response", response_id)
        if not self._durable.is_there:
            raise Unavailable(
                "running responses are in NATS, which is out of reach", code="storage_unavailable"
            )
        with or_unavailable():
            return await self._ledger.get(tenant, response_id)

    async def _append_event(
        self, tenant: str, response_id: str, *events: dict[str, Any], in_place_of_all: bool = False
    ) -> None:
        """Appends events to the response's stream while other writers may append too. The response
        may have been deleted."""
        while True:
            writer = EventWriter(self._durable, tenant, response_id)
            await writer.catch_up()
            if in_place_of_all:
                await writer.forget()
            for event in events:
                writer.add(event)
            with contextlib.suppress(Overtaken):
                await writer.flush()
                return

    async def _stream(
        self, exchange: Exchange, caller: Caller, response_id: str, *, after: int
    ) -> None:
        """Sends events until the last one, or until the client leaves: the response goes on either
        way."""
        out = exchange.open_stream(lambda: None)
        last = after

        def failure(error: HeadwaterError) -> bytes:
            # A client that asks for the events after this one misses none.
            number = {"sequence_number": last} if last >= 0 else {}
            return _rendered(response_error(error) | number)

        exchange.error_event = failure

        def check() -> None:
            self._tenants.check(caller.tenant)

        async def write() -> None:
            nonlocal last
            async for event in follow(self._durable, caller.tenant.key, response_id, after, check):
                out.write(_rendered(event))
                last = event["sequence_number"]
                # A response may have megabytes of events, which would wait in memory for each
                # reader that is slow.
                await out.taken()

        def keep_alive() -> None:
            if not out.blocked:
                out.write(KEEP_ALIVE)

        with or_unavailable():
            await exchange.unless_client_leaves(
                write(), silence=self._keep_alive, on_silence=keep_alive
            )
        await exchange.end_stream(b"")


_BEGINNING = ("created", "queued")


def _cancel(record: Record) -> None:
    if not record.is_over:
        record.end(record.response | {"status": "cancelled"})


def _with_seed(body: bytes, seed: int | None) -> bytes:
    """The body with a seed, so that every run of it writes the same."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if seed is None:
        fields["seed"] = msgspec.Raw(b"%d" % secrets.randbits(62))
    return msgspec.json.encode(fields)


def _rendered(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
