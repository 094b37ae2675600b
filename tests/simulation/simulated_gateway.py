"""A gateway in the simulation: the real membership, index and router; requests are sent to
simulated engines.

It has no text and no sessions, but an answer goes on where a dead engine left it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.engine_core.sampling_params import SamplingParams
from headwater.gateway.router.replica import Incarnation
from headwater.gateway.router.router import Router
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.prober import Prober
from headwater.services.runtime.served_model import ServedModel
from tests.simulation.bus_twin import BusTwin
from tests.simulation.replica_facts import EngineStub, ProberTwin
from tests.simulation.simulated_engine import EngineLost, SimulatedEngine, Stream
from tests.simulation.store_twin import StoreTwin

RETRY_SECONDS = 0.05
"""Seconds until a request that no replica could take tries again."""


@dataclass(slots=True)
class Answer:
    """A request and its results."""

    number: int
    model: ServedModel
    prompt_ids: list[int]
    sampling: SamplingParams
    tenant: Tenant = Tenant(id="open")
    output_ids: list[int] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    """Replicas that computed it, one after another."""
    cached_tokens: int = 0
    predicted_tokens: int = 0
    """Number of predicted tokens of the last attempt, as the tokens above."""
    is_done: bool = False


class SimulatedGateway:
    """One gateway. Use within `running`."""

    def __init__(
        self,
        bus: BusTwin,
        store: StoreTwin,
        find: Callable[[str], SimulatedEngine | None],
        epoch: int,
        seeds: Sequence[str],
    ) -> None:
        """`find` returns the engine at an address now, if there is one."""
        self.bus = bus
        self.store = store
        self._find = find
        clock = asyncio.get_running_loop().time
        self.members = Members(
            bus, (Kind.ENGINE,), {Kind.ENGINE: seeds}, probers=self._probers, clock=clock
        )
        self.feed = IndexFeed(
            bus, self.members, store, dial=self._dial, clock=clock, wall_clock=clock
        )
        self.router = Router(bus, self.members, self.feed, clock=clock, epoch=epoch)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedGateway]:
        async with self.members.running(), self.feed.running(), self.router.running():
            yield self

    async def run_request(self, answer: Answer) -> None:
        """Runs a request until its answer is whole, over as many engines as it takes."""
        hashes = b"".join(block_hashes(b"\0" * 16, answer.prompt_ids, answer.model.block_size))
        failed: set[Incarnation] = set()
        while not answer.is_done:
            await self.router.consult(answer.model.key, hashes)
            try:
                await self._wait_for_replica(answer)
                await self._attempt(answer, hashes, failed)
            except Unavailable:
                failed.clear()
                await asyncio.sleep(RETRY_SECONDS)
            except EngineLost:
                continue

    async def _wait_for_replica(self, answer: Answer) -> None:
        """Waits where a supervisor brings the model's engine. Raises `Unavailable`."""

    async def _attempt(self, answer: Answer, hashes: bytes, failed: set[Incarnation]) -> None:
        num_tokens = len(answer.prompt_ids)
        max_tokens = answer.sampling.max_tokens
        decision = self.router.choose(
            answer.model.key, hashes, num_tokens, max_tokens, exclude=failed
        )
        answer.replicas.append(decision.replica_id)
        answer.predicted_tokens = decision.predicted_cached_tokens
        dispatch = self.router.dispatches.begin(decision, str(answer.number))

        def started(cached: int) -> None:
            answer.cached_tokens = cached
            self.router.dispatches.started(dispatch, cached)

        def tokens(first: int, ids: list[int]) -> None:
            assert first == len(answer.output_ids), (
                f"request {answer.number}: token {first} lost or doubled"
            )
            answer.output_ids += ids

        is_fault = False
        key = 0
        engine = self._find(decision.address)
        try:
            if engine is None or engine.facts.member.epoch != decision.member.epoch:
                raise EngineLost
            stream = Stream(started, tokens)
            key = engine.open(
                *(answer.prompt_ids, answer.output_ids, answer.sampling, stream),
                tenant=answer.tenant.key,
                weight=answer.tenant.weight,
            )
            await stream.ended
            answer.is_done = True
        except EngineLost:
            is_fault = True
            failed.add(decision.incarnation)
            raise
        finally:
            if engine is not None and key:
                engine.cancel(key)
            self.router.dispatches.finished(dispatch, failed=is_fault)

    @contextlib.asynccontextmanager
    async def _dial(self, address: str) -> AsyncIterator[EngineStub]:
        yield EngineStub(
            lambda: engine.facts if (engine := self._find(address)) is not None else None
        )

    @contextlib.asynccontextmanager
    async def _probers(self) -> AsyncIterator[Prober]:
        yield ProberTwin(
            lambda address: engine.facts if (engine := self._find(address)) is not None else None
        )
