"""An engine in the simulation: the real scheduler, blocks and events over the simulated executor,
in virtual time.

`kill` ends it without a last message, `pause` makes it hang. It keeps its column of the index in
Redis, as a real engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import ReleasableMemory
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import StepOutput
from headwater.services.engine.core.messages import Command, Sleep, Wake
from headwater.services.engine.stage.published_load import replica_load
from headwater.services.engine.stage.sleep_calls import SleepCalls
from headwater.services.index.column import Owner
from headwater.services.index.writer import IndexWriter
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Member, ReplicaLoad
from headwater.services.runtime.store import Store
from headwater.services.runtime.tasks import owned_task
from tests.simulation.replica_facts import ReplicaFacts

STEP_SECONDS = 0.01


class EngineLost(Exception):
    """The engine died with the stream."""


@dataclass(slots=True, eq=False)
class Stream:
    """Receiver of a request's answer."""

    on_started: Callable[[int], None]
    """Called with the number of tokens that were found cached."""
    on_tokens: Callable[[int, list[int]], None]
    """Called with the index of the first token, and the tokens."""
    ended: asyncio.Future[FinishReason] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SimulatedEngine:
    """One engine. Use within `running`."""

    def __init__(
        self,
        member: Member,
        bus: Bus,
        store: Store,
        config: EngineConfig,
        model: SimulatedModel,
        *,
        memory_of: Callable[[ReleasableMemory], ReleasableMemory] | None = None,
        move_seconds: float = 0.0,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        """`memory_of` makes of the executor's memory what sleep gives back; None: the engine does
        not sleep. Either way takes `move_seconds`."""
        assert member.model is not None
        clock = asyncio.get_running_loop().time
        owner = Owner(
            replica_id=member.replica_id,
            epoch=member.epoch,
            address=member.address,
            capacity=config.num_blocks,
        )
        self.writer = IndexWriter(store, member.model, owner, clock=clock)
        self.facts = ReplicaFacts(member, bus, self.load, self.writer.apply)
        executor = SimulatedExecutor(config, model, clock=clock)
        memory = None if memory_of is None else memory_of(executor.releasable)
        self.core = Engine(config, executor, clock=clock, memory=memory)
        self.sleep_calls = SleepCalls(self._send, self.core.load)
        self._move_seconds = move_seconds
        self._step_seconds = step_seconds
        self._commands: deque[Command] = deque()
        self._keys = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._wanted = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self.is_dead = False
        self.died = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedEngine]:
        async with self.writer.running(), self.facts.running(), owned_task(self._step_for_ever()):
            yield self

    def open(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        sampling: SamplingParams,
        stream: Stream,
        *,
        tenant: str,
        weight: float,
    ) -> int:
        """Opens a request, or the rest of one. Raises `EngineLost`."""
        if self.is_dead:
            raise EngineLost
        key = next(self._keys)
        self._streams[key] = stream
        self.core.add(
            NewRequest(
                key=key,
                prompt_ids=list(prompt_ids),
                output_ids=list(output_ids),
                sampling=sampling,
                tenant=tenant,
                weight=weight,
            )
        )
        self._wanted.set()
        return key

    def cancel(self, key: int) -> None:
        if self._streams.pop(key, None) is not None and not self.is_dead:
            self.core.cancel(key)
            self._wanted.set()

    def kill(self) -> None:
        """Ends the engine: every stream is lost, and no later message of it is received."""
        self.is_dead = True
        self.died.set()
        self._goes_on.clear()
        streams = self._streams
        self._streams = {}
        for stream in streams.values():
            if not stream.ended.done():
                stream.ended.set_exception(EngineLost())

    def pause(self) -> None:
        self._goes_on.clear()

    def resume(self) -> None:
        if not self.is_dead:
            self._goes_on.set()

    def load(self) -> ReplicaLoad:
        return replica_load(
            self.core.load(), prefill_tps=3200.0, itl_seconds=self._step_seconds, max_running=8
        )

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self._wanted.set()

    async def _step_for_ever(self) -> None:
        while True:
            while not (self.core.has_work() or self._commands):
                self._wanted.clear()
                await self._wanted.wait()
            await self._goes_on.wait()
            await self._obey()
            output = self.core.step()
            await asyncio.sleep(self._step_seconds)
            await self._goes_on.wait()
            if output is not None:
                self._emit(output)
            self.facts.changed()
            self.sleep_calls.on_report()

    async def _obey(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            await asyncio.sleep(self._move_seconds)
            await self._goes_on.wait()
            if isinstance(command, Sleep):
                self.core.sleep(command.call)
            else:
                assert isinstance(command, Wake)
                self.core.wake(command.call)

    def _emit(self, output: StepOutput) -> None:
        if output.cache_events is not None:
            self.facts.log.note(output.cache_events)
        self.facts.changed()
        for start in output.starts:
            if (stream := self._streams.get(start.key)) is not None:
                stream.on_started(start.cached_tokens)
        place = 0
        for key, first, num in zip(output.keys, output.first_index, output.num_tokens, strict=True):
            if (stream := self._streams.get(key)) is not None:
                stream.on_tokens(first, output.token_ids[place : place + num])
            place += num
        for finish in output.finishes:
            stream = self._streams.pop(finish.key, None)
            if stream is not None and not stream.ended.done():
                stream.ended.set_result(finish.reason)
