"""The REST handlers of /admin/adapters, and vLLM's of /v1/load_lora_adapter: adapters are checked
by every engine of their model before one of them serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import grpc
import msgspec

from headwater.proto import engine_pb2, engine_pb2_grpc
from headwater.services.runtime import errors, grpc_errors
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Members
from headwater.services.runtime.model_name import MAX_NAME_LEN, NAME_ALLOWED, is_model_name

from ..http.http_exchange import Exchange
from ..openai.decode import decode
from ..stages.processors import Processors
from ..stages.served_adapters import published
from .administration import Administration

ReplyT = TypeVar("ReplyT")
MAX_BODY_BYTES = 64 * 1024
CHECK_SECONDS = 120.0
PUBLISH_SECONDS = 10.0
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LEN)]
Folder = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class NewAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/adapters"""

    name: Name
    folder: Folder
    """A folder in PEFT's layout, on the hosts of the engines."""
    base: str = ""
    """The served model that it belongs to; empty: the only one."""


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
        processors: Processors,
        administration: Administration,
        adapter_dir: str,
    ) -> None:
        """`adapter_dir`: folder of adapters that clients may load; empty: they may not."""
        self._members = members
        self._processors = processors
        self._administration = administration
        self._adapter_dir = adapter_dir

    async def list_adapters(self, exchange: Exchange) -> None:
        self._administration.caller(exchange)
        engines = self._members.of(Kind.ENGINE)
        cards = [_card(name, *known, engines) for name, known in published(engines).items()]
        await exchange.reply_json({"object": "list", "data": cards})

    async def load(self, exchange: Exchange) -> None:
        """Answered when every engine of the model serves the adapter."""
        caller = self._administration.caller(exchange)
        asked = decode(await exchange.body(MAX_BODY_BYTES), NewAdapter)
        async with self._administration.recorded(
            caller, "load-adapter", msgspec.to_builtins(asked)
        ):
            card = await self._load(asked)
        await exchange.reply_json(card, 201)

    async def unload(self, exchange: Exchange) -> None:
        """Answered when no new request gets the adapter; running ones keep it to their end."""
        caller = self._administration.caller(exchange)
        name = exchange.path_params["name"]
        async with self._administration.recorded(caller, "unload-adapter", {"name": name}):
            await self._unload(name)
        await exchange.reply_json({"id": name, "object": "adapter", "deleted": True})

    async def load_lora(self, exchange: Exchange) -> None:
        self._check_allowed(exchange)
        asked = decode(await exchange.body(MAX_BODY_BYTES), LoadLora)
        is_taken = asked.lora_name in published(self._members.of(Kind.ENGINE))
        if is_taken and not asked.load_inplace:
            raise errors.BadRequest(
                "lora_name",
                f"the adapter {asked.lora_name!r} is loaded; allowed: another name, or "
                "load_inplace true",
            )
        new = NewAdapter(name=asked.lora_name, folder=asked.lora_path)
        await self._load(new, within=self._adapter_dir)
        text = f"Success: LoRA adapter '{asked.lora_name}' added successfully."
        await exchange.reply(text.encode(), TEXT)

    async def unload_lora(self, exchange: Exchange) -> None:
        self._check_allowed(exchange)
        asked = decode(await exchange.body(MAX_BODY_BYTES), UnloadLora)
        await self._unload(asked.lora_name)
        text = f"Success: LoRA adapter '{asked.lora_name}' removed successfully."
        await exchange.reply(text.encode(), TEXT)

    def _check_allowed(self, exchange: Exchange) -> None:
        """Raises `LoadingNotAllowed`, and what a caller without an administrator's rights gets."""
        if not self._adapter_dir:
            raise LoadingNotAllowed(exchange.path)
        self._administration.caller(exchange)

    async def _load(self, asked: NewAdapter, within: str = "") -> dict[str, Any]:
        """Has every engine check the adapter, then every one publish it. What an engine refuses is
        published by none."""
        if not is_model_name(asked.name):
            raise errors.BadRequest.of("name", asked.name, NAME_ALLOWED)
        base = asked.base or self._processors.only_model()
        if self._processors.serves(asked.name):
            raise errors.BadRequest.of("name", asked.name, "a name that no model has")
        engines = self._engines_of(base)
        known = published(self._members.of(Kind.ENGINE)).get(asked.name)
        if known is not None and known[0] != base:
            raise errors.BadRequest.of("name", asked.name, "a name that no model's adapter has")
        check = engine_pb2.CheckAdapterRequest(folder=asked.folder, within=within)
        replies = await _each(engines, lambda each: each.CheckAdapter(check, timeout=CHECK_SECONDS))
        failures = [each for each in replies if isinstance(each, errors.HeadwaterError)]
        checked = {
            engine: reply
            for engine, reply in zip(engines, replies, strict=True)
            if not isinstance(reply, errors.HeadwaterError)
        }
        digests = {reply.digest for reply in checked.values()}
        if failures or len(digests) > 1:
            await _forget(checked)
            if failures:
                raise failures[0]
            hosts = "the same files on the hosts of all engines"
            raise errors.BadRequest.of("folder", asked.folder, hosts)
        [digest] = digests
        publish = engine_pb2.PublishAdapterRequest(name=asked.name, digest=digest)
        published_by = await _each(
            engines, lambda each: each.PublishAdapter(publish, timeout=PUBLISH_SECONDS)
        )
        if lost := [each for each in published_by if isinstance(each, errors.HeadwaterError)]:
            raise lost[0]
        await self._until(lambda: self._all_publish(engines, asked.name, digest))
        engines = self._members.of(Kind.ENGINE)
        return _card(asked.name, *published(engines)[asked.name], engines)

    async def _unload(self, name: str) -> None:
        """Takes the name from every engine that has it. Raises `NotFound` where none has."""
        engines = [
            engine
            for engine in self._members.of(Kind.ENGINE)
            if any(each.name == name for each in engine.adapters)
        ]
        if not engines:
            raise errors.NotFound("adapter", name)
        unload = engine_pb2.UnloadAdapterRequest(name=name)
        replies = await _each(
            engines, lambda each: each.UnloadAdapter(unload, timeout=PUBLISH_SECONDS)
        )
        if failed := [each for each in replies if isinstance(each, errors.HeadwaterError)]:
            raise failed[0]
        await self._until(lambda: name not in published(self._members.of(Kind.ENGINE)))

    def _engines_of(self, base: str) -> list[Member]:
        """The engines that serve a model, at least one. Raises `NotFound`, `Unavailable`."""
        self._processors.model(base)
        engines = [
            each
            for each in self._members.of(Kind.ENGINE)
            if each.model is not None and each.model.name == base and not each.draining
        ]
        if not engines:
            raise errors.Unavailable(f"no engine of {base!r} is within reach", code="no_replica")
        return engines

    def _all_publish(self, engines: Sequence[Member], name: str, digest: bytes) -> bool:
        """Whether those of the engines that are still there report the adapter."""
        own = {(each.replica_id, each.epoch) for each in engines}
        return all(
            any((has.name, has.digest) == (name, digest) for has in each.adapters)
            for each in self._members.of(Kind.ENGINE)
            if (each.replica_id, each.epoch) in own
        )

    async def _until(self, is_seen: Callable[[], bool]) -> None:
        """Returns when this gateway has heard of the change; other gateways hear of it by the same
        heartbeats."""
        async with asyncio.timeout(PUBLISH_SECONDS):
            await self._members.wait_for(lambda _: is_seen())


TEXT = b"text/plain; charset=utf-8"


async def _forget(checked: dict[Member, engine_pb2.CheckAdapterReply]) -> None:
    """Has engines drop what they checked, unless it has a name there."""
    for engine, reply in checked.items():
        request = engine_pb2.UnloadAdapterRequest(digest=reply.digest)
        await _each([engine], partial(_unload, request))


def _unload(
    request: engine_pb2.UnloadAdapterRequest, engine: engine_pb2_grpc.EngineAsyncStub
) -> Awaitable[engine_pb2.UnloadAdapterReply]:
    return engine.UnloadAdapter(request)


async def _each(
    engines: Sequence[Member],
    ask: Callable[[engine_pb2_grpc.EngineAsyncStub], Awaitable[ReplyT]],
) -> list[ReplyT | errors.HeadwaterError]:
    """Replies of engines that are asked at once, or what they failed with."""
    return list(await asyncio.gather(*(_ask(engine, ask) for engine in engines)))


async def _ask(
    engine: Member, ask: Callable[[engine_pb2_grpc.EngineAsyncStub], Awaitable[ReplyT]]
) -> ReplyT | errors.HeadwaterError:
    async with open_channel(engine.address) as channel:
        try:
            return await ask(engine_pb2_grpc.EngineStub(channel))
        except grpc.aio.AioRpcError as failure:
            return grpc_errors.from_rpc_error(failure)


def _card(name: str, base: str, adapter: Any, engines: Sequence[Member]) -> dict[str, Any]:
    return {
        "id": name,
        "object": "adapter",
        "base": base,
        "digest": adapter.digest.hex(),
        "rank": adapter.rank,
        "replicas": sorted(
            engine.replica_id
            for engine in engines
            if any(each.digest == adapter.digest for each in engine.adapters)
        ),
    }
