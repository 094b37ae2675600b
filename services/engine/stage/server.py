"""The server: joins sessions and the core. The output of steps goes to the sessions of its
requests, commands go to the core.

Knows nothing about the wire below a session, nor where facts are published.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from headwater.engine_core.request import NewRequest
from headwater.engine_core.step_output import EngineLoad
from headwater.proto.events_pb2 import KvEventBatch

from ...runtime.errors import Unavailable
from ...runtime.member import ReplicaLoad
from ...runtime.session.attempt_fence import AttemptFence
from ...runtime.tracing import NO_TRACING, Tracing
from ..core.client import CoreClient
from ..core.figures import CoreFigures
from ..core.messages import (
    Add,
    Cancel,
    Command,
    OfSteps,
    Probe,
    Ready,
    Step,
)
from .adapters import EngineAdapters
from .grammar_queue import GrammarQueue
from .grammars import GrammarCompiler
from .kv_events import KvEventLog
from .masks import MaskWriter
from .prefetches import OpenPrefetches
from .published_load import replica_load
from .requests import Limits
from .role import EngineRole
from .session import EngineSession
from .sessions import EngineSessions
from .sleep_calls import SleepCalls
from .step_figures import StepFigures

_SWEEP_SECONDS = 1.0
_CONFIRM_SECONDS = 2.0
"""Time that the core has to end requests that a drain cancels."""


class EngineServer:
    """Serves one core to all sessions; is a session's `Host`."""

    def __init__(
        self,
        core: CoreClient,
        ready: Ready,
        events: KvEventLog,
        model_name: str,
        compiler: GrammarCompiler,
        tracing: Tracing = NO_TRACING,
        role: str = "",
    ) -> None:
        """`role`; empty: both."""
        self.tracing = tracing
        self.load_changed = asyncio.Event()
        self.adapters = EngineAdapters(core.send, self.load_changed.set)
        self.limits = Limits(
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            refused_fields=ready.refused_fields,
            drafters=ready.drafters,
            has_adapter=self.adapters.has,
        )
        self.keys: Iterator[int] = itertools.count(1)
        self.fence = AttemptFence()
        self.prefetches = OpenPrefetches(core.send, pulls=ready.num_peer_rows > 0)
        self.events = events
        self.is_draining = False
        self._role = EngineRole(core.send)
        self.sleep_calls = SleepCalls(core.send, lambda: self.totals)
        self.num_prompt_tokens = 0
        self._is_open = False
        self._core = core
        self._ready = ready
        self.figures = StepFigures(model_name)
        self._sessions = EngineSessions()
        self._step = 0
        writer = MaskWriter(core.memory.map_masks(ready), core.send, self.figures.note_masks)
        self.grammars = GrammarQueue(
            compiler, writer, send=core.send, deliver=self._sessions.deliver
        )
        core.connect(self._on_report, self._on_end)
        if role:
            self.role = role

    def open(self, publish: Callable[[KvEventBatch], None]) -> None:
        """Takes new requests from now on; `publish` gets every batch of KV events, those so far
        included."""
        self.events.open(publish)
        self._is_open = True

    def session(self) -> AbstractContextManager[EngineSession]:
        """A session inside the `with` block; leaving it cancels its streams."""
        return self._sessions.session(self)

    def check_open(self) -> None:
        if self.is_draining:
            raise Unavailable("draining", code="draining")
        if not self._is_open:
            raise Unavailable("starting", code="starting")
        if self._core.is_congested:
            raise Unavailable(
                "the engine cannot take requests as fast as they come", code="overloaded"
            )

    def enter(self, request: NewRequest, grammar: bytes) -> None:
        self.num_prompt_tokens += len(request.prompt_ids)
        self.adapters.note_use(request.adapter)
        if grammar:
            self.grammars.enter(request, grammar)
        else:
            self._core.send(Add(request))

    def send(self, command: Command) -> None:
        if isinstance(command, Cancel):
            self.grammars.cancel(command.keys)
        elif isinstance(command, Probe):
            command.keys = [key for key in command.keys if not self.grammars.has(key)]
        self._core.send(command)

    def session_changed(self) -> None:
        self._sessions.note_changed()

    @property
    def core_figures(self) -> CoreFigures:
        return self._core.figures

    def load(self) -> ReplicaLoad:
        load = self.totals
        rates = self.figures.rates
        return replica_load(
            load,
            sleep_state=self.sleep_calls.state,
            step=self._step,
            prefill_tps=rates.prefill_tps,
            itl_seconds=rates.itl(max(load.num_running, 1)),
            itl_seconds_per_request=rates.itl_per_request,
            draining=self.is_draining,
            max_running=self._ready.max_num_seqs,
            kv_seq=self.events.seq,
            role=self._role.name,
            max_chunk_tokens=self._ready.max_chunk_tokens,
        )

    @property
    def num_finished(self) -> dict[str, int]:
        """Streams by the reason of their end."""
        return self.figures.num_finished

    @property
    def without(self) -> tuple[str, ...]:
        """Tiers that the engine has lost, by name."""
        disk = self.totals.disk
        return ("kv disk",) if disk is not None and disk.failure else ()

    @property
    def totals(self) -> EngineLoad:
        """Load that the core reported last."""
        return self._core.load

    @property
    def cache_config(self) -> dict[str, str]:
        """Labels of the metric that describes the KV cache."""
        ready = self._ready
        return {
            "cache_dtype": ready.kv_format,
            "block_size": str(ready.block_size),
            "num_blocks": str(ready.load.num_total_blocks),
        }

    @property
    def is_prepared(self) -> bool:
        """See `CoreClient.is_prepared`."""
        return self._core.is_prepared

    @property
    def role(self) -> str:
        return self._role.name

    @role.setter
    def role(self, role: str) -> None:
        """Sets the engine's role. Routers get it with the next load message, which is due at once;
        running requests stay."""
        self._role.become(role)
        self.load_changed.set()

    async def sweep(self) -> None:
        """Cancels streams whose readers have been out of room for too long; looks once a second
        until it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._sessions.cancel_starved(asyncio.get_running_loop().time())

    async def drain(self, seconds: float) -> tuple[int, int]:
        """Takes nothing new, hands over what would not end within so many seconds, then whatever
        has not ended, and ends the sessions.

        Returns how many streams ended by themselves and how many were handed over.
        """
        self.is_draining = True
        self.load_changed.set()
        self.prefetches.end()
        num_streams = self._sessions.num_streams
        most_tokens = self._tokens_within(seconds)
        num_cancelled = self._sessions.hand_over(most_tokens)
        await self._sessions.await_idle(seconds)
        num_cancelled += self._sessions.hand_over(0)
        await self._sessions.await_idle(_CONFIRM_SECONDS)
        self._sessions.end()
        return num_streams - num_cancelled, num_cancelled

    def _tokens_within(self, seconds: float) -> float:
        """Tokens that each stream gets in this time: none while the engine sleeps."""
        if not self.sleep_calls.is_awake:
            return 0
        return self.figures.tokens_within(seconds, self.totals.num_running)

    def _on_report(self, report: OfSteps) -> None:
        if isinstance(report, Step):
            self._on_step(report)
        self.sleep_calls.on_report()
        if not (isinstance(report, Step) and report.is_routine):
            self.load_changed.set()

    def _on_step(self, step: Step) -> None:
        output = step.output
        self._step = output.step
        self._sessions.deliver(output)
        self.grammars.on_output(output)
        if output.cache_events is not None:
            self.events.note(output.cache_events, is_routine=step.is_routine)
        elif not step.is_routine:
            # The next turn may look for blocks of an answer that has ended.
            self.events.flush_soon()
        self.figures.note(step)

    def _on_end(self) -> None:
        """Ends every stream and every session: the core is gone."""
        self._is_open = False
        self._sessions.end(Unavailable("the engine core has ended", code="engine_core_ended"))
