"""Figures of the requests of all gateways of a cluster, which any one of them shows to people who watch.

A gateway that has watchers asks the others over the bus; without watchers nothing is said. The last answer of one that
is late counts for a few seconds, so that a busy gateway does not come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.tasks import owned_task

from .gateway_figures import GatewayFigures

ASK_SECONDS = 0.5
"""Watchers who look within this time of each other share the answers."""
PATIENCE_SECONDS = 0.3
"""For the answers to one question."""
EXPIRY_SECONDS = 3.0
MAX_ANSWER_BYTES = 512 * 1024
"""Largest answer in bytes, below the largest message of the bus."""
ReadFigures = Callable[[str | None], GatewayFigures]


class _Question(msgspec.Struct):
    gateway_id: str
    """Gateway that asks."""
    tenant: str | None
    """Key of the tenant whose requests are meant; None: all."""


class _Answer(msgspec.Struct):
    tenant: str | None
    figures: GatewayFigures


@dataclass(slots=True)
class _Told:
    """What other gateways have said to one question, which is asked again and again."""

    asked_at: float = -ASK_SECONDS
    figures: dict[str, tuple[GatewayFigures, float]] = field(default_factory=dict)
    """By gateway, with the time of arrival."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class ClusterFigures:
    """Use within `running`, or alone where there is no bus: then it knows only its own gateway."""

    def __init__(
        self,
        bus: Bus,
        gateways: Members,
        gateway_id: str,
        read: ReadFigures,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns the figures of this gateway, of the tenant with a key, or of all."""
        self._bus, self._gateways, self._gateway_id, self._read, self._clock = bus, gateways, gateway_id, read, clock
        self._told: defaultdict[str | None, _Told] = defaultdict(_Told)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ClusterFigures]:
        """Answers the other gateways, and takes their answers, for the length of a scope."""
        async with (
            self._bus.subscribe(subjects.LIVE_FIGURES) as questions,
            self._bus.subscribe(subjects.live_figures(self._gateway_id)) as answers,
            owned_task(self._answer(questions)),
            owned_task(self._take(answers)),
        ):
            yield self

    async def gather(self, tenant: str | None) -> list[GatewayFigures]:
        """Figures of this gateway, then of the others in the order of their names. `tenant` is the key of the only
        tenant whose requests are meant; None: all."""
        others = {each.replica_id for each in self._gateways.of(Kind.GATEWAY)} - {self._gateway_id}
        if not others or not self._bus.connected:
            return [self._read(tenant)]
        self._forget_unasked()
        told = self._told[tenant]
        if self._clock() - told.asked_at >= ASK_SECONDS:
            told.asked_at = self._clock()
            question = msgspec.msgpack.encode(_Question(self._gateway_id, tenant))
            await self._bus.publish(subjects.LIVE_FIGURES, question)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, told.asked_at + PATIENCE_SECONDS - self._clock())):
                await self._all_answered(told, others)
        oldest = self._clock() - EXPIRY_SECONDS
        known = {name: figures for name, (figures, at) in told.figures.items() if name in others and at > oldest}
        return [self._read(tenant), *(known[name] for name in sorted(known))]

    async def _all_answered(self, told: _Told, others: set[str]) -> None:
        """Returns when each of the gateways has answered the last question."""
        while any(told.figures.get(name, (None, told.asked_at - 1.0))[1] < told.asked_at for name in others):
            told.arrived.clear()
            await told.arrived.wait()

    def _forget_unasked(self) -> None:
        oldest = self._clock() - EXPIRY_SECONDS
        for tenant in [tenant for tenant, told in self._told.items() if told.asked_at < oldest]:
            del self._told[tenant]

    async def _answer(self, questions: Subscription) -> None:
        async for message in questions:
            with contextlib.suppress(msgspec.DecodeError):
                question = msgspec.msgpack.decode(message.payload, type=_Question)
                if question.gateway_id != self._gateway_id:
                    answer = msgspec.msgpack.encode(_Answer(question.tenant, self._read(question.tenant)))
                    if len(answer) <= MAX_ANSWER_BYTES:
                        await self._bus.publish(subjects.live_figures(question.gateway_id), answer)
            await asyncio.sleep(0)

    async def _take(self, answers: Subscription) -> None:
        async for message in answers:
            with contextlib.suppress(msgspec.DecodeError):
                answer = msgspec.msgpack.decode(message.payload, type=_Answer)
                if (told := self._told.get(answer.tenant)) is not None:
                    told.figures[answer.figures.gateway_id] = answer.figures, self._clock()
                    told.arrived.set()
