"""REST handlers of /admin/models, which forward requests to the supervisors that load and unload
models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headwater.services.runtime import errors, subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.model_name import (
    MAX_NAME_LEN,
    MAX_PLACE_LEN,
    NAME_ALLOWED,
    PLACE_ALLOWED,
    is_model_name,
    is_model_place,
)

from ..http.http_exchange import Exchange
from ..openai.decode import decode
from ..stages.catalogues import Catalogues
from .administration import Administration

MAX_BODY_BYTES = 64 * 1024
ASK_SECONDS = 2.0
TURNS = ("sleep", "wake", "pin", "unpin")
NO_SUPERVISOR = (
    "no supervisor of this cluster answers over NATS: models are loaded and unloaded where "
    "`headwater up` runs it; "
    "elsewhere (compose, Kubernetes) start a processor, an output processor and engines for "
    "the model"
)
Place = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PLACE_LEN)]
Number = Annotated[int, msgspec.Meta(ge=0, le=4096)]


class NewModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /admin/models"""

    model: Place
    """A name or a path on the supervisor's machine."""
    served_model_name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LEN)] = ""
    min_replicas: Number | None = None
    max_replicas: Number | None = None
    escape_special_tokens: bool = False
    numerics: Literal["default", "tree"] | None = None
    """Numerics of every engine of the model; None: those of the cluster."""
    settings: dict[str, Any] | None = None
    """Settings of the model alone, by the names of flags of `headwater up`; the supervisor knows
    which there are."""


class NewBounds(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """PATCH /admin/models/{name}: given fields replace the old values."""

    min_replicas: Number | None = None
    max_replicas: Number | None = None


class NewWeights(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/models/{name}/weights"""

    folder: Place
    """A name or a path on the supervisor's machine, as of a model to load."""
    requests: Literal["pause", "end"] = "pause"
    """Fate of requests that run or wait: they go on from their tokens, or end."""


class ModelAdmin:
    """Models of a cluster, which its supervisor loads and unloads. Without a supervisor every call
    is refused with a sentence that says so."""

    def __init__(self, bus: Bus, catalogues: Catalogues, administration: Administration) -> None:
        self._bus = bus
        self._catalogues = catalogues
        self._administration = administration

    async def list_models(self, exchange: Exchange) -> None:
        self._administration.caller(exchange)
        await self._supervisors()
        await exchange.reply_json({"object": "list", "data": await self.cards()})

    async def cards(self) -> list[dict[str, Any]]:
        """The supervisors' cards of their models. Raises `Unavailable` for a supervisor that does
        not answer."""
        return [
            card
            for each in self._catalogues.supervisors()
            for card in await self._ask(each, {"do": "list"})
        ]

    async def load_model(self, exchange: Exchange) -> None:
        """Answered at once with 202; the list says how far it is."""
        caller, asked = (
            self._administration.caller(exchange),
            decode(await exchange.body(MAX_BODY_BYTES), NewModel),
        )
        if not is_model_place(asked.model):
            raise errors.BadRequest.of("model", asked.model, PLACE_ALLOWED)
        if asked.served_model_name:
            _check_name("served_model_name", asked.served_model_name)
        supervisor, *_ = await self._supervisors()
        change = msgspec.to_builtins(asked)
        async with self._administration.recorded(caller, "load-model", change):
            (card,) = await self._ask(supervisor, {"do": "load", **change})
        await exchange.reply_json(card, 202)

    async def scale_model(self, exchange: Exchange) -> None:
        """Answered at once with 202; the list says how many replicas there are."""
        caller, asked = (
            self._administration.caller(exchange),
            decode(await exchange.body(MAX_BODY_BYTES), NewBounds),
        )
        name = _name_of(exchange)
        change = msgspec.to_builtins(asked)
        await self._supervisors()
        cards: list[Any] = []
        async with self._administration.recorded(caller, "scale-model", {"model": name, **change}):
            for supervisor in self._catalogues.owners(name):
                cards += await self._ask(supervisor, {"do": "scale", "model": name, **change})
            if not cards:
                raise errors.NotFound("model", name)
        await exchange.reply_json(cards[0], 202)

    async def turn_model(self, turn: str, exchange: Exchange) -> None:
        """POST /admin/models/{name}/{turn}, one of `TURNS`: answered at once with 202; the list
        says when it is done."""
        caller = self._administration.caller(exchange)
        name = _name_of(exchange)
        await self._supervisors()
        cards: list[Any] = []
        async with self._administration.recorded(caller, f"{turn}-model", {"model": name}):
            for supervisor in self._catalogues.owners(name):
                cards += await self._ask(supervisor, {"do": turn, "model": name})
            if not cards:
                raise errors.NotFound("model", name)
        await exchange.reply_json(cards[0], 202)

    async def replace_weights(self, exchange: Exchange) -> None:
        """POST /admin/models/{name}/weights: answered at once with 202; the list says when the
        model's engines compute with the folder's weights, or why they do not."""
        caller, asked = (
            self._administration.caller(exchange),
            decode(await exchange.body(MAX_BODY_BYTES), NewWeights),
        )
        name = _name_of(exchange)
        if not is_model_place(asked.folder):
            raise errors.BadRequest.of("folder", asked.folder, PLACE_ALLOWED)
        await self._supervisors()
        change = {"folder": asked.folder, "ends_requests": asked.requests == "end"}
        cards: list[Any] = []
        async with self._administration.recorded(
            caller, "replace-weights", {"model": name} | change
        ):
            if len(owners := self._catalogues.owners(name)) > 1:
                raise errors.BadRequest(
                    "name",
                    f"{name!r} is served by {len(owners)} supervisors; allowed: a model of one",
                    code="weights_refused",
                )
            for supervisor in owners:
                cards += await self._ask(supervisor, {"do": "weights", "model": name, **change})
            if not cards:
                raise errors.NotFound("model", name)
        await exchange.reply_json(cards[0], 202)

    async def unload_model(self, exchange: Exchange) -> None:
        """Answered at once with 202; the model is gone from the list when its requests have
        ended."""
        caller = self._administration.caller(exchange)
        name = _name_of(exchange)
        supervisors = await self._supervisors()
        cards: list[Any] = []
        async with self._administration.recorded(caller, "unload-model", {"model": name}):
            # A model that failed to load is in no catalogue, so any supervisor is asked.
            for supervisor in self._catalogues.owners(name) or supervisors[:1]:
                cards += await self._ask(supervisor, {"do": "unload", "model": name})
        await exchange.reply_json(cards[0], 202)

    async def _supervisors(self) -> list[str]:
        """Supervisors, at least one."""
        await self._catalogues.settled()
        if not (supervisors := self._catalogues.supervisors()):
            raise errors.Unavailable(NO_SUPERVISOR, code="no_supervisor")
        return supervisors

    async def _ask(self, supervisor: str, request: dict[str, Any]) -> list[Any]:
        subject = subjects.models_control(supervisor)
        reply = await self._bus.request(subject, msgspec.json.encode(request), seconds=ASK_SECONDS)
        if reply is None:
            raise errors.Unavailable(NO_SUPERVISOR, code="no_supervisor")
        answer = msgspec.json.decode(reply)
        if (refusal := answer.get("error")) is not None:
            if refusal["code"] == "model_not_found" and request["do"] != "load":
                raise errors.NotFound("model", request["model"])
            # Supervisors of the previous release do not name the field.
            param = refusal.get("param", "model")
            raise errors.BadRequest(param, refusal["message"], code=refusal["code"])
        cards: list[Any] = answer["models"]
        return cards


def _name_of(exchange: Exchange) -> str:
    """The name in a request's path. Raises `BadRequest`."""
    name = exchange.path_params["name"]
    _check_name("name", name)
    return name


def _check_name(param: str, name: str) -> None:
    """Raises `BadRequest` for a name that no model is served under."""
    if not is_model_name(name):
        raise errors.BadRequest.of(param, name, NAME_ALLOWED)
