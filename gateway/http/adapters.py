"""The REST handlers of /v1/adapters: adapters that a tenant brings, from files that it uploaded."""

from __future__ import annotations

import contextlib
from typing import Any

from headwater.services.runtime.errors import NotFound

from ..adapters.own_adapters import OwnAdapters
from ..adapters.records import AdapterRecord
from ..buckets import or_unavailable
from ..jobs.batches.files import Files
from ..jobs.tenant_storage import TenantStorage
from ..openai.adapter_schema import NewOwnAdapter
from ..openai.decode import decode
from .callers import Callers
from .http_exchange import Exchange, Route

MAX_BODY_BYTES = 64 * 1024


class AdapterSurface:
    def __init__(self, adapters: OwnAdapters, storage: TenantStorage, callers: Callers) -> None:
        self._adapters = adapters
        self._files = Files(storage.durable)
        self._callers = callers

    def routes(self) -> list[Route]:
        return [
            ("POST", "/v1/adapters", self.add),
            ("GET", "/v1/adapters", self.list_all),
            ("DELETE", "/v1/adapters/{name:path}", self.remove),
        ]

    async def add(self, exchange: Exchange) -> None:
        """Answered when every engine of the model serves it to the tenant."""
        tenant = (await self._callers.counted(exchange)).tenant
        asked = decode(await exchange.body(MAX_BODY_BYTES), NewOwnAdapter)
        self._adapters.check_count(tenant, asked.name)
        async with contextlib.AsyncExitStack() as stack:
            uploads = []
            num_bytes = 0
            for file_id in asked.file_ids:
                try:
                    with or_unavailable():
                        num_bytes += (await self._files.get(tenant.key, file_id)).bytes
                        opened = self._files.opened(tenant.key, file_id)
                        uploads.append(await stack.enter_async_context(opened))
                except NotFound as missing:
                    missing.param = "file_ids"
                    raise
            record = await self._adapters.add(tenant, asked.name, asked.base, uploads, num_bytes)
        await exchange.reply_json(_card(record), 201)

    async def list_all(self, exchange: Exchange) -> None:
        tenant = self._callers.identify(exchange).tenant
        cards = [_card(each) for each in self._adapters.of(tenant)]
        await exchange.reply_json({"object": "list", "data": cards})

    async def remove(self, exchange: Exchange) -> None:
        tenant = self._callers.identify(exchange).tenant
        name = exchange.path_params["name"]
        await self._adapters.remove(tenant.key, name)
        await exchange.reply_json({"id": name, "object": "adapter", "deleted": True})


def _card(record: AdapterRecord) -> dict[str, Any]:
    return {
        "id": record.name,
        "object": "adapter",
        "base": record.base,
        "digest": record.digest.hex(),
        "rank": record.rank,
        "bytes": record.num_bytes,
        "created": int(record.created_at),
    }
