"""Ollama's API over HTTP: the served models."""

from __future__ import annotations

from ..ollama import model_cards
from ..ollama.decode import decode
from ..ollama.schema import ShowRequest
from ..request.cluster import Cluster
from ..settings import GatewaySettings
from ..wire.required import given
from .callers import Callers
from .http_exchange import Exchange, Route


class OllamaModels:
    """The handlers."""

    def __init__(self, cluster: Cluster, callers: Callers, settings: GatewaySettings) -> None:
        self._cluster = cluster
        self._callers = callers
        self._max_text_bytes = settings.max_text_bytes
        self._shows_templates = settings.tokenizer_info

    def routes(self) -> list[Route]:
        return [
            ("GET", "/api/tags", self.tags),
            ("GET", "/api/ps", self.running),
            ("POST", "/api/show", self.show),
            ("GET", "/api/version", self.version),
        ]

    async def tags(self, exchange: Exchange) -> None:
        tenant = self._callers.identify(exchange).tenant
        await exchange.reply_json(model_cards.tags(self._cluster.served.of(tenant).values()))

    async def running(self, exchange: Exchange) -> None:
        self._callers.identify(exchange)
        await exchange.reply_json(model_cards.running(self._cluster))

    async def show(self, exchange: Exchange) -> None:
        caller = self._callers.admit(exchange)
        body = await exchange.body(self._max_text_bytes)
        asked = await self._cluster.long_work.by_size(
            caller.tenant.key, len(body), decode, body, ShowRequest
        )
        asked_name = given("model", asked.model or asked.name, "a served model's name")
        name = model_cards.served_name(self._cluster, asked_name)
        await self._callers.count(caller, name)
        # Raises for an unknown model, before a processor is asked.
        self._cluster.stages.processors.model(name)
        model, since = self._cluster.stages.processors.models()[name]
        known = await self._cluster.stages.processors.tokenizer_info(name)
        shown = model_cards.shown(model, since, known, with_template=self._shows_templates)
        await exchange.reply_json(shown)

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": model_cards.API_VERSION})
