"""The REST handlers of what the console's pages Live and System read when a person opens them: the
last hours, stores and disks, settings in force, log lines. Administrators only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headwater.services.runtime import errors, subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.membership import Members
from headwater.services.runtime.settings_in_force import settings_in_force
from headwater.services.runtime.store import Store

from ..admin.administration import Administration
from ..http.http_exchange import Exchange, Route
from ..request.cluster import Cluster
from ..settings import GatewaySettings
from ..stages.catalogues import Catalogues
from .gateway_survey import GatewaySurvey
from .samples import SAMPLE_SECONDS, Sample, Samples, merged
from .store_rows import nats_rows, redis_rows, store_row

ASK_SECONDS = 2.0
NO_SUPERVISOR = (
    "no supervisor of this cluster answers over NATS: it reads logs where `headwater up` runs; "
    "elsewhere see `docker compose logs`, `kubectl logs` or the journal"
)
NO_DISKS = (
    "disks are not shown: no supervisor (`headwater up`) of this cluster answers over NATS; "
    "elsewhere see `df`, or kubelet_volume_stats_available_bytes in Prometheus"
)
SettingRows = list[dict[str, str]]
SampleSurvey = GatewaySurvey[None, list[Sample]]
SettingSurvey = GatewaySurvey[None, SettingRows]


class _Answer(msgspec.Struct):
    """Answer of a supervisor: data, or the reason why there are none."""

    data: list[Any] | None = None
    error: str = ""


_answers = msgspec.json.Decoder(_Answer)


class SystemPages:
    """The handlers. Use `open`."""

    def __init__(
        self,
        administration: Administration,
        catalogues: Catalogues,
        bus: Bus,
        store: Store,
        samples: SampleSurvey,
        settings: SettingSurvey,
    ) -> None:
        self._administration = administration
        self._catalogues = catalogues
        self._bus = bus
        self._store = store
        self._samples = samples
        self._settings = settings

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        cluster: Cluster,
        bus: Bus,
        store: Store,
        gateways: Members,
        settings: GatewaySettings,
        administration: Administration,
    ) -> AsyncIterator[SystemPages]:
        """Takes samples, asks the other gateways and answers them, inside the `with` block."""
        name = cluster.timelines.gateway_id
        own = [row | {"process": name} for row in settings_in_force(settings, os.environ)]
        async with Samples.running(cluster) as kept:
            samples: SampleSurvey = GatewaySurvey(
                bus, gateways, name, "samples", lambda _: kept.all(), (None, list[Sample])
            )
            of_gateways: SettingSurvey = GatewaySurvey(
                bus, gateways, name, "settings", lambda _: own, (None, SettingRows)
            )
            async with samples.running(), of_gateways.running():
                yield cls(administration, cluster.catalogues, bus, store, samples, of_gateways)

    def routes(self) -> list[Route]:
        return [
            ("GET", "/console/history", self.history),
            ("GET", "/admin/stores", self.stores),
            ("GET", "/admin/configuration", self.configuration),
            ("GET", "/admin/model-settings", self.model_settings),
            ("GET", "/admin/logs", self.logs),
            ("GET", "/admin/logs/{name}", self.log),
        ]

    async def history(self, exchange: Exchange) -> None:
        """Samples of the last hours, of all gateways together."""
        self._administration.caller(exchange)
        exchange.end_head()
        rows = merged(await self._samples.gather(None))
        await exchange.reply_json({"seconds": SAMPLE_SECONDS, "data": rows})

    async def stores(self, exchange: Exchange) -> None:
        """Fill of NATS and its streams, of Redis, and of the supervisors' disks; without a
        supervisor, a note that says where disks are shown."""
        self._administration.caller(exchange)
        exchange.end_head()
        rows = [*await nats_rows(self._bus), *await redis_rows(self._store)]
        supervised = await self._ask_all("disks")
        for name, answer in supervised.items():
            kind = f"disk of {name}"
            if answer.error:
                rows.append(store_row(kind, "", problem=answer.error))
            rows += [store_row(kind, **disk) for disk in answer.data or ()]
        await _reply_list(exchange, rows, note="" if supervised else NO_DISKS)

    async def configuration(self, exchange: Exchange) -> None:
        """Settings in force with their sources: of supervisors and of all gateways."""
        self._administration.caller(exchange)
        exchange.end_head()
        supervised = [
            row | {"process": f"up ({name})"}
            for name, answer in (await self._ask_all("settings")).items()
            for row in answer.data or ()
        ]
        gateways = [row for rows in await self._settings.gather(None) for row in rows]
        await _reply_list(exchange, [*supervised, *gateways])

    async def model_settings(self, exchange: Exchange) -> None:
        """Settings that a loaded model may have for itself. Raises `Unavailable` without a
        supervisor."""
        self._administration.caller(exchange)
        exchange.end_head()
        first, *_ = await self._supervised("model_settings")
        await _reply_list(exchange, first or [])

    async def logs(self, exchange: Exchange) -> None:
        """Names of processes with logs. Raises `Unavailable` without a supervisor."""
        self._administration.caller(exchange)
        exchange.end_head()
        names = {name for found in await self._supervised("logs") for name in found or ()}
        await _reply_list(exchange, sorted(names))

    async def log(self, exchange: Exchange) -> None:
        """The last lines of a process's log. Raises `NotFound`, and as `logs`."""
        self._administration.caller(exchange)
        name = exchange.path_params["name"]
        found = [each for each in await self._supervised("log", name=name) if each is not None]
        if not found:
            raise errors.NotFound("log", name)
        await _reply_list(exchange, [line for lines in found for line in lines])

    async def _supervised(self, ask: str, **more: str) -> list[list[Any] | None]:
        """Answers of supervisors. Raises `Unavailable` where none answers, or one cannot."""
        await self._catalogues.settled()
        if not (answers := await self._ask_all(ask, **more)):
            raise errors.Unavailable(NO_SUPERVISOR, code="no_supervisor")
        for name, answer in answers.items():
            if answer.error:
                raise errors.Unavailable(f"{name}: {answer.error}", code="supervisor_failed")
        return [answer.data for answer in answers.values()]

    async def _ask_all(self, ask: str, **more: str) -> dict[str, _Answer]:
        """Answers by supervisor, of those that answer in time."""
        question = msgspec.json.encode({"ask": ask, **more})
        answers = {}
        for name in self._catalogues.supervisors():
            subject = subjects.supervisor_facts(name)
            reply = await self._bus.request(subject, question, seconds=ASK_SECONDS)
            if reply is not None:
                answers[name] = _answers.decode(reply)
        return answers


async def _reply_list(exchange: Exchange, rows: list[Any], **more: str) -> None:
    await exchange.reply_json({"object": "list", "data": rows, **more})
