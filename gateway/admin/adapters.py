"""The REST handlers of /admin/adapters, and vLLM's of /v1/load_lora_adapter: adapters are checked
by every engine of their model before one of them serves it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from headwater.services.runtime import errors
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Members
from headwater.services.runtime.model_name import MAX_NAME_LEN

from ..adapters.loading import AdapterLoading
from ..adapters.names import AdapterNames
from ..adapters.placement import has
from ..adapters.records import OPERATOR, AdapterRecord
from ..http.http_exchange import Exchange
from ..openai.decode import decode
from .administration import Administration

MAX_BODY_BYTES = 64 * 1024
MAX_TENANTS = 1000
TEXT = b"text/plain; charset=utf-8"
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LEN)]
Folder = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class NewAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/adapters"""

    name: Name
    folder: Folder
    """A folder in PEFT's layout, on the hosts of the engines."""
    base: str = ""
    """The served model that the adapter is for; empty: the only one."""
    tenants: Annotated[list[str], msgspec.Meta(max_length=MAX_TENANTS)] | None = None
    """Names of the tenants that may use it; None: all."""


class LoadLora(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: Name
    lora_path: Folder
    load_inplace: bool = False
    """Whether a name that is taken gets the new content."""


class UnloadLora(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: Name
    lora_int_id: int | None = None


class LoadingNotAllowed(errors.NotFound):
    """Clients may not load adapters. Names the setting by which operators allow it."""

    def __init__(self, path: str) -> None:
        super().__init__("path", path)
        self.args = (
            f"{self}; a gateway with --adapter-dir answers it; operators load adapters by "
            "POST /admin/adapters",
        )


class AdapterAdmin:
    def __init__(
        self,
        members: Members,
        names: AdapterNames,
        loading: AdapterLoading,
        administration: Administration,
        adapter_dir: str,
    ) -> None:
        """`adapter_dir`: folder of adapters that clients may load; empty: they may not."""
        self._members = members
        self._loading = loading
        self._names = names
        self._administration = administration
        self._adapter_dir = adapter_dir

    async def list_adapters(self, exchange: Exchange) -> None:
        self._administration.caller(exchange)
        await exchange.reply_json({"object": "list", "data": self.cards()})

    def cards(self) -> list[dict[str, Any]]:
        """Cards of all adapters: those of the catalogue, and those that engines were started
        with."""
        engines = self._members.of(Kind.ENGINE)
        return [_card(record, engines) for record in self._names.all()]

    async def load(self, exchange: Exchange) -> None:
        """Answered when every engine of the model serves the adapter."""
        caller = self._administration.caller(exchange)
        asked = decode(await exchange.body(MAX_BODY_BYTES), NewAdapter)
        async with self._administration.recorded(
            caller, "load-adapter", msgspec.to_builtins(asked)
        ):
            record = await self._loading.load(_draft(asked))
        await exchange.reply_json(_card(record, self._members.of(Kind.ENGINE)), 201)

    async def unload(self, exchange: Exchange) -> None:
        """Answered when no new request gets the adapter; running ones keep it to their end."""
        caller = self._administration.caller(exchange)
        name = exchange.path_params["name"]
        async with self._administration.recorded(caller, "unload-adapter", {"name": name}):
            await self._loading.unload(OPERATOR, name)
        await exchange.reply_json({"id": name, "object": "adapter", "deleted": True})

    async def load_lora(self, exchange: Exchange) -> None:
        self._check_allowed(exchange)
        asked = decode(await exchange.body(MAX_BODY_BYTES), LoadLora)
        is_taken = any(each["id"] == asked.lora_name for each in self.cards())
        if is_taken and not asked.load_inplace:
            raise errors.BadRequest(
                "lora_name",
                f"the adapter {asked.lora_name!r} is loaded; allowed: another name, or "
                "load_inplace true",
            )
        new = NewAdapter(name=asked.lora_name, folder=asked.lora_path)
        await self._loading.load(_draft(new), within=self._adapter_dir)
        text = f"Success: LoRA adapter '{asked.lora_name}' added successfully."
        await exchange.reply(text.encode(), TEXT)

    async def unload_lora(self, exchange: Exchange) -> None:
        self._check_allowed(exchange)
        asked = decode(await exchange.body(MAX_BODY_BYTES), UnloadLora)
        await self._loading.unload(OPERATOR, asked.lora_name)
        text = f"Success: LoRA adapter '{asked.lora_name}' removed successfully."
        await exchange.reply(text.encode(), TEXT)

    def _check_allowed(self, exchange: Exchange) -> None:
        """Raises `LoadingNotAllowed`, and what a caller without an administrator's rights gets."""
        if not self._adapter_dir:
            raise LoadingNotAllowed(exchange.path)
        self._administration.caller(exchange)


def _draft(asked: NewAdapter) -> AdapterRecord:
    tenants = None if asked.tenants is None else tuple(asked.tenants)
    return AdapterRecord(
        name=asked.name, base=asked.base, digest=b"", rank=0, folder=asked.folder, tenants=tenants
    )


def _card(record: AdapterRecord, engines: list[Member]) -> dict[str, Any]:
    return {
        "id": record.name,
        "object": "adapter",
        "base": record.base,
        "digest": record.digest.hex(),
        "rank": record.rank,
        "owner": record.owner or None,
        "tenants": record.tenants,
        "num_bytes": record.num_bytes or None,
        "created": int(record.created_at),
        "replicas": sorted(each.replica_id for each in engines if has(each, record.digest)),
    }
