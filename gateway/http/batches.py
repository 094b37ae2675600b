"""The REST handlers of /v1/files and /v1/batches, in OpenAI's shapes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.datastructures import UploadFile

from headwater.services.runtime.batch_endpoints import BATCH_ENDPOINTS
from headwater.services.runtime.errors import BadRequest, LimitExceeded, NotFound

from ..buckets import or_unavailable
from ..jobs.batches.files import Files
from ..jobs.batches.ledger import Ledger
from ..jobs.batches.records import OVER, Batch, File, Kept, new_id, now
from ..jobs.tenant_storage import TenantStorage
from ..openai.batch_schema import NewBatch
from ..openai.decode import decode
from ..openai.not_served import check_served
from ..openai.paging import page_of
from ..tenancy.tenants import Tenant
from ..wire.required import given
from .callers import Callers
from .http_exchange import Exchange, Route, file_headers
from .upload_form import check_form, read_form

BATCH = "batch"
PURPOSES = (BATCH, "adapter")
MAX_FILES = 1000
MAX_FILENAME = 255
"""Files of a tenant; characters of a file's name."""
MAX_IN_TRANSIT = 16
"""Most files of a tenant that one gateway receives or sends at once: each is on its disk
meanwhile."""
MAX_WINDOW_HOURS = 7 * 24
MAX_OPEN_BATCHES = 100
"""Batches of a tenant that are not over."""
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_BATCH_BODY_BYTES = 64 * 1024


class BatchSurface:
    def __init__(
        self,
        storage: TenantStorage,
        callers: Callers,
        max_file_bytes: int,
    ) -> None:
        self._files = Files(storage.durable)
        self._ledger = Ledger(storage.durable)
        self._storage = storage
        self._max_file_bytes = max_file_bytes
        self._callers = callers
        self._num_in_transit: Counter[str] = Counter()
        """Number of files that are received or sent, by key of their tenant."""

    def routes(self) -> list[Route]:
        return [
            ("POST", "/v1/files", self.add_file),
            ("GET", "/v1/files", self.list_files),
            ("GET", "/v1/files/{id}", self.get_file),
            ("GET", "/v1/files/{id}/content", self.file_content),
            ("DELETE", "/v1/files/{id}", self.delete_file),
            ("POST", "/v1/batches", self.add_batch),
            ("GET", "/v1/batches", self.list_batches),
            ("GET", "/v1/batches/{id}", self.get_batch),
            ("POST", "/v1/batches/{id}/cancel", self.cancel_batch),
        ]

    async def add_file(self, exchange: Exchange) -> None:
        tenant = (await self._callers.counted(exchange)).tenant
        check_form(exchange.headers.get("content-type", ""))
        with self._in_transit(tenant):
            added = await self._received(exchange)
        await exchange.reply_json(added)

    @contextlib.contextmanager
    def _in_transit(self, tenant: Tenant) -> Iterator[None]:
        """Scope in which a file of a tenant lies on this machine. Raises `LimitExceeded`."""
        if self._num_in_transit[tenant.key] >= MAX_IN_TRANSIT:
            message = (
                f"{MAX_IN_TRANSIT} files of the tenant are received or sent already; allowed: "
                f"{MAX_IN_TRANSIT}"
            )
            raise LimitExceeded(message, retry_after=5.0)
        self._num_in_transit[tenant.key] += 1
        try:
            yield
        finally:
            self._num_in_transit -= Counter({tenant.key: 1})

    async def _received(self, exchange: Exchange) -> File:
        """The file of a form, stored. Raises `BadRequest`, and what reading and storing it
        raise."""
        form = await read_form(exchange, self._max_file_bytes)
        try:
            for field, value in form.multi_items():
                check_served(field.partition("[")[0], field, value)
            file = form.get("file")
            purpose = form.get("purpose")
            if not isinstance(file, UploadFile):
                raise BadRequest("file", "file is missing; allowed: one file", code="missing_field")
            allowed = " or ".join(PURPOSES)
            if given("purpose", purpose, allowed) not in PURPOSES:
                raise BadRequest.of("purpose", purpose, allowed)
            # The body may have taken long, and the key may be gone since.
            tenant = self._callers.identify(exchange).tenant
            with or_unavailable():
                if len(await self._files.all(tenant.key)) >= MAX_FILES:
                    raise LimitExceeded(
                        f"the tenant has {MAX_FILES} files; delete some", retry_after=60.0
                    )
                name = (file.filename or "file")[:MAX_FILENAME]
                num_bytes = file.size or 0
                async with self._storage.room(tenant.key, num_bytes):
                    return await self._files.add(
                        tenant.key, name, str(purpose), file.file, num_bytes
                    )
        finally:
            await form.close()

    async def list_files(self, exchange: Exchange) -> None:
        tenant = (await self._callers.counted(exchange)).tenant
        with or_unavailable():
            files = await self._files.all(tenant.key)
        purpose = exchange.query.get("purpose")
        await exchange.reply_json(
            _page(exchange, [file for file in files if purpose in (None, file.purpose)])
        )

    async def get_file(self, exchange: Exchange) -> None:
        tenant = (await self._callers.counted(exchange)).tenant
        with or_unavailable():
            await exchange.reply_json(await self._files.get(tenant.key, exchange.path_params["id"]))

    async def file_content(self, exchange: Exchange) -> None:
        tenant = (await self._callers.counted(exchange)).tenant
        file_id = exchange.path_params["id"]
        with or_unavailable():
            file = await self._files.get(tenant.key, file_id)
            if exchange.method == "HEAD":
                await exchange.reply_head(file_headers(file.bytes))
                return
            with self._in_transit(tenant):
                async with self._files.opened(tenant.key, file_id) as content:
                    await exchange.reply_file(content, file.bytes)

    async def delete_file(self, exchange: Exchange) -> None:
        tenant = self._callers.identify(exchange).tenant
        file_id = exchange.path_params["id"]
        with or_unavailable():
            await self._files.delete(tenant.key, file_id)
        await exchange.reply_json({"id": file_id, "object": "file", "deleted": True})

    async def add_batch(self, exchange: Exchange) -> None:
        tenant = (await self._callers.counted(exchange)).tenant
        asked = decode(await exchange.body(MAX_BATCH_BODY_BYTES), NewBatch)
        hours = _checked(asked)
        with or_unavailable():
            await self._check_input(tenant, asked)
            running = [
                batch
                for batch in await self._ledger.batches(tenant.key)
                if batch.status not in OVER
            ]
            if len(running) >= MAX_OPEN_BATCHES:
                raise LimitExceeded(
                    f"the tenant has {MAX_OPEN_BATCHES} batches that are not over", retry_after=60.0
                )
            batch = Batch(
                id=new_id("batch_"),
                endpoint=asked.endpoint,
                input_file_id=asked.input_file_id,
                completion_window=asked.completion_window,
                created_at=now(),
                expires_at=now() + hours * 3600,
                metadata=asked.metadata,
            )
            async with self._storage.room(tenant.key, 0):
                await self._ledger.add(Kept.of(batch, tenant))
        await exchange.reply_json(batch)

    async def _check_input(self, tenant: Tenant, asked: NewBatch) -> None:
        """Raises `NotFound`, in the name of the field, for a file that the tenant does not have."""
        try:
            await self._files.get(tenant.key, asked.input_file_id)
        except NotFound as missing:
            missing.param = "input_file_id"
            raise

    async def list_batches(self, exchange: Exchange) -> None:
        tenant = self._callers.identify(exchange).tenant
        with or_unavailable():
            batches = await self._ledger.batches(tenant.key)
        await exchange.reply_json(_page(exchange, batches))

    async def get_batch(self, exchange: Exchange) -> None:
        tenant = self._callers.identify(exchange).tenant
        with or_unavailable():
            kept = await self._ledger.get(tenant.key, exchange.path_params["id"])
        await exchange.reply_json(kept.batch)

    async def cancel_batch(self, exchange: Exchange) -> None:
        """Cancels a batch: the gateway that runs it ends it with the existing results."""
        tenant = self._callers.identify(exchange).tenant
        with or_unavailable():
            kept = await self._ledger.change(tenant.key, exchange.path_params["id"], _cancel)
        await exchange.reply_json(kept.batch)


def _cancel(kept: Kept) -> None:
    batch = kept.batch
    if batch.is_over or batch.status == "finalizing":
        raise BadRequest(
            "batch_id",
            f"the batch is {batch.status}; allowed: one that is not over",
            code="batch_over",
        )
    if batch.status != "cancelling":
        batch.become("cancelling")


def _checked(asked: NewBatch) -> int:
    """Hours of its window. Raises `BadRequest`."""
    if asked.endpoint not in BATCH_ENDPOINTS:
        raise BadRequest.of("endpoint", asked.endpoint, ", ".join(BATCH_ENDPOINTS))
    number = asked.completion_window[:-1]
    unit = asked.completion_window[-1:]
    is_number = number.isascii() and number.isdigit() and len(number) <= 3
    if unit != "h" or not is_number or not 1 <= int(number) <= MAX_WINDOW_HOURS:
        raise BadRequest.of(
            "completion_window", asked.completion_window, f"1h…{MAX_WINDOW_HOURS}h; usual: 24h"
        )
    metadata = asked.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise BadRequest(
            "metadata", f"metadata has {len(metadata)} entries; allowed: {MAX_METADATA}"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            allowed = f"keys of {MAX_METADATA_KEY} characters, values of {MAX_METADATA_VALUE}"
            raise BadRequest.of("metadata", {key: value}, allowed)
    return int(number)


def _page(exchange: Exchange, items: Sequence[File | Batch]) -> dict[str, Any]:
    return page_of(exchange.query, msgspec.to_builtins(items))
