"""The REST handlers of /admin/models: what supervisors serve, loading and unloading. They do it; this asks them.

With administrators' keys one is needed, and each change leaves a record. Without any keys, on loopback that is,
everyone on this machine may, but no web page.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec

from headwater.gateway.catalogues import Catalogues
from headwater.gateway.exchange import Exchange
from headwater.gateway.openai.decode import decode
from headwater.gateway.tenancy.admin import AdminSurface
from headwater.services import errors, subjects
from headwater.services.bus import Bus

MAX_BODY_BYTES = 64 * 1024
ASK_SECONDS = 2.0
NO_SUPERVISOR = (
    "no supervisor of this line answers: models are loaded and unloaded where `headwater up` runs it; elsewhere "
    "(compose, Kubernetes) start a processor, an output processor and engines for the model"
)
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Number = Annotated[int, msgspec.Meta(ge=0, le=4096)]


class NewModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /admin/models"""

    model: Name
    """A name or a path on the supervisor's machine."""
    served_model_name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    min_replicas: Number | None = None
    max_replicas: Number | None = None


class ModelSurface:
    """Without a supervisor every call says so."""

    def __init__(self, bus: Bus, catalogues: Catalogues, admin: AdminSurface | None, *, is_open: bool) -> None:
        self._bus, self._catalogues, self._admin, self._is_open = bus, catalogues, admin, is_open

    async def list_models(self, exchange: Exchange) -> None:
        self._caller(exchange)
        if not (supervisors := self._catalogues.supervisors()):
            raise errors.Unavailable(NO_SUPERVISOR, code="no_supervisor")
        found = [card for each in supervisors for card in await self._ask(each, {"do": "list"})]
        await exchange.reply_json({"object": "list", "data": found})

    async def load_model(self, exchange: Exchange) -> None:
        """Answered at once with 202; the list says how far it is."""
        caller, asked = self._caller(exchange), decode(await exchange.body(MAX_BODY_BYTES), NewModel)
        supervisor = next(iter(self._catalogues.supervisors()), None)
        if supervisor is None:
            raise errors.Unavailable(NO_SUPERVISOR, code="no_supervisor")
        change = msgspec.to_builtins(asked)
        async with self._recorded(caller, "load-model", change):
            (card,) = await self._ask(supervisor, {"do": "load", **change})
        await exchange.reply_json(card, 202)

    async def unload_model(self, exchange: Exchange) -> None:
        """Answered at once with 202; the model is gone from the list when its requests have ended."""
        caller, name = self._caller(exchange), exchange.path_params["name"]
        if not self._catalogues.supervisors():
            raise errors.Unavailable(NO_SUPERVISOR, code="no_supervisor")
        cards: list[Any] = []
        async with self._recorded(caller, "unload-model", {"model": name}):
            # A model that failed is in no catalogue: whoever is there is asked.
            for supervisor in self._catalogues.owners(name) or self._catalogues.supervisors()[:1]:
                cards += await self._ask(supervisor, {"do": "unload", "model": name})
        await exchange.reply_json(cards[0], 202)

    async def _ask(self, supervisor: str, request: dict[str, Any]) -> list[Any]:
        subject = subjects.models_control(supervisor)
        reply = await self._bus.ask(subject, msgspec.json.encode(request), seconds=ASK_SECONDS)
        if reply is None:
            raise errors.Unavailable(NO_SUPERVISOR, code="no_supervisor")
        answer = msgspec.json.decode(reply)
        if (refusal := answer.get("error")) is not None:
            if refusal["code"] == "model_not_found" and request["do"] == "unload":
                raise errors.NotFound("model", request["model"])
            raise errors.BadRequest("model", refusal["message"], code=refusal["code"])
        cards: list[Any] = answer["models"]
        return cards

    def _caller(self, exchange: Exchange) -> str:
        """The administrator's name; empty where there are none and everyone may."""
        if self._admin is not None:
            return self._admin.admin_of(exchange)
        if not self._is_open:
            raise errors.PermissionDenied("models are loaded with an administrator's key: set one at the gateway")
        if "origin" in exchange.headers:
            raise errors.PermissionDenied("without keys a web page may not load models")
        return ""

    @contextlib.asynccontextmanager
    async def _recorded(self, admin: str, action: str, change: dict[str, Any]) -> AsyncIterator[None]:
        if self._admin is None:
            yield
            return
        async with self._admin.recorded(admin, action, "", change):
            yield
