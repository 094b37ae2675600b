"""Doubted requests of all gateways, by engine: a request of another gateway may be why it died.

A gateway sends the others its own, whenever they change and each second while there are any. They
expire three seconds after its last message. Without the bus each gateway knows its own alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from headwater.proto.events_pb2 import DoubtedEngine, Incarnation
from headwater.proto.events_pb2 import Doubts as DoubtsMessage
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.tasks import owned_task, set_within

from ..router.replica import Incarnation as EngineLife

BEAT_SECONDS = 1.0
EXPIRY_SECONDS = 3.0
DEAD_SECONDS = 5.0
"""Seconds for which a gateway reports an engine's death: others may notice it later."""
STAGGER_SECONDS = 0.1
"""Most seconds by which a gateway delays the trial of a doubted request. Each gateway draws its own
delay, so that after a death one gateway begins and the others see its result."""
LOOK_SECONDS = 0.5
"""Seconds after which a gateway that fell silent may be forgotten."""
PATIENCE_SECONDS = 10.0
"""Longest time for which a suspect waits while other gateways try theirs."""


@dataclass(slots=True)
class _Peer:
    received_at: float
    engines: list[tuple[str, EngineLife, bool]]
    """Key of the model, engine, and whether it is dead."""


class Doubts:
    """Use within `running`. `epoch`: identifies this run of the gateway; `has_others`: whether
    there are other gateways."""

    def __init__(
        self,
        bus: Bus,
        epoch: int = 0,
        has_others: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._epoch = epoch
        self._has_others = has_others
        self._clock = clock
        self._own: Counter[tuple[str, EngineLife]] = Counter()
        self._dead: dict[tuple[str, EngineLife], float] = {}
        """Time at which an engine died that had doubted requests of this gateway."""
        self._peers: dict[int, _Peer] = {}
        self._changed = asyncio.Event()
        self._heard = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Doubts]:
        """Tells and listens inside the `with` block."""
        async with (
            self._bus.subscribe(subjects.EVERY_DOUBT) as messages,
            owned_task(self._read(messages)),
            owned_task(self._publish()),
        ):
            yield self

    def begin(self, model_key: str, engine: EngineLife) -> None:
        """Notes that a doubted request runs on the engine."""
        self._own[model_key, engine] += 1
        self._changed.set()

    def end(self, model_key: str, engine: EngineLife, *, has_died: bool) -> None:
        """Notes that it does not any more, or is doubted no more."""
        self._own[model_key, engine] -= 1
        if self._own[model_key, engine] <= 0:
            del self._own[model_key, engine]
        if has_died:
            self._dead[model_key, engine] = self._clock()
        self._changed.set()

    def are_elsewhere(self, engine: EngineLife) -> bool:
        """Whether another gateway has a doubted request on the engine, or had one when it died."""
        return any(engine == each for _, each, _ in self._engines_of_others())

    async def until_alone(self, model_key: str) -> None:
        """Returns when no other gateway has a doubted request of the model on an engine that lives,
        or after a while."""
        if not self._has_others():
            return
        await asyncio.sleep(self._epoch % 997 / 997 * STAGGER_SECONDS)
        end = self._clock() + PATIENCE_SECONDS
        while self._clock() < end and self._is_tried_elsewhere(model_key):
            self._heard.clear()
            await set_within(self._heard, LOOK_SECONDS)

    def _is_tried_elsewhere(self, model_key: str) -> bool:
        return any(
            key == model_key and not is_dead for key, _, is_dead in self._engines_of_others()
        )

    def _engines_of_others(self) -> list[tuple[str, EngineLife, bool]]:
        now = self._clock()
        self._peers = {
            epoch: peer
            for epoch, peer in self._peers.items()
            if now - peer.received_at <= EXPIRY_SECONDS and peer.engines
        }
        return [each for peer in self._peers.values() for each in peer.engines]

    async def _publish(self) -> None:
        while True:
            if self._own or self._dead:
                await set_within(self._changed, BEAT_SECONDS)
            else:
                await self._changed.wait()
            self._changed.clear()
            await self._bus.publish(
                subjects.doubts(self._epoch), self._message().SerializeToString()
            )

    def _message(self) -> DoubtsMessage:
        """This gateway's message to the others about its engines."""
        now = self._clock()
        self._dead = {each: at for each, at in self._dead.items() if now - at <= DEAD_SECONDS}
        engines = [
            DoubtedEngine(
                model_key=key, replica=Incarnation(replica_id=name, epoch=epoch), is_dead=is_dead
            )
            for which, is_dead in ((self._own, False), (self._dead, True))
            for key, (name, epoch) in which
        ]
        return DoubtsMessage(epoch=self._epoch, engines=engines)

    async def _read(self, messages: Subscription) -> None:
        async for _, message in messages.decoded(DoubtsMessage.FromString, "doubts"):
            if message.epoch != self._epoch:
                engines = [
                    (each.model_key, (each.replica.replica_id, each.replica.epoch), each.is_dead)
                    for each in message.engines
                ]
                self._peers[message.epoch] = _Peer(self._clock(), engines)
                self._heard.set()
