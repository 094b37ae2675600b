"""The server: joins sessions and the core. Steps go out to the sessions they speak of, commands go
in.

Knows nothing about the wire below a session, nor where facts are published.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import structlog

from headwater.engine_core.parallel.rank_facts import RankFigures
from headwater.engine_core.request import NewRequest
from headwater.engine_core.step_output import EngineLoad, StepOutput
from headwater.proto.events_pb2 import KvEventBatch

from ..runtime.errors import Unavailable
from ..runtime.member import ReplicaLoad
from ..runtime.role import BOTH, DECODE
from ..runtime.session.attempt_fence import AttemptFence
from ..runtime.tracing import NO_TRACING, Tracing
from .core_client import CoreClient
from .grammar_queue import GrammarQueue
from .grammars import GrammarCompiler
from .kv_events import KvEventLog
from .masks import MaskWriter
from .messages import Add, BoundPrompts, Cancel, Command, Idle, Probe, Ready, Step, Waiting
from .metrics import (
    DECODE_SECONDS,
    MASK_SECONDS,
    PREFILL_SECONDS,
    QUEUE_SECONDS,
    STEP_SECONDS,
    STEP_TOKENS,
)
from .prefetches import OpenPrefetches
from .rates import Rates
from .requests import Limits
from .session import EngineSession

PROMPT_SECONDS = 0.01
"""Time that a step of a decode engine spends on prompts. Answers arrive from other engines at any
time, and their readers would notice a longer gap between two tokens."""
_SWEEP_SECONDS = 1.0
_CONFIRM_SECONDS = 2.0
"""Time that the core has to end requests that a drain cancels."""
_SAME_LOAD = {each.name for each in fields(EngineLoad)} & {
    each.name for each in fields(ReplicaLoad)
}
"""Figures that other processes get as the core reports them."""


class EngineServer:
    """Every session of one core; is a session's `Host`."""

    def __init__(
        self,
        core: CoreClient,
        ready: Ready,
        events: KvEventLog,
        model_name: str,
        compiler: GrammarCompiler,
        tracing: Tracing = NO_TRACING,
        role: str = BOTH,
    ) -> None:
        self.tracing = tracing
        self.limits = Limits(
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            refused_fields=ready.refused_fields,
            drafters=ready.drafters,
        )
        self.keys: Iterator[int] = itertools.count(1)
        self.fence = AttemptFence()
        self.prefetches = OpenPrefetches(core.send, pulls=ready.num_peer_rows > 0)
        self.events = events
        self.load_changed = asyncio.Event()
        self.is_draining = False
        self._role = BOTH
        self.num_prompt_tokens = 0
        self.num_finished: Tally[str] = Tally()
        """Streams by the reason of their end."""
        self._is_open = False
        self._core = core
        self._ready = ready
        self._rates = Rates()
        self._step_seconds = STEP_SECONDS.labels(model_name)
        self._queue_seconds = QUEUE_SECONDS.labels(model_name)
        self._prefill_seconds = PREFILL_SECONDS.labels(model_name)
        self._decode_seconds = DECODE_SECONDS.labels(model_name)
        self._step_tokens = STEP_TOKENS.labels(model_name)
        self._started_at: dict[int, float] = {}
        """When the first token of a running stream came, by the core's key."""
        self._sessions: set[EngineSession] = set()
        self._changed = asyncio.Event()
        self._step = 0
        writer = MaskWriter(
            core.map_masks(ready), core.send, MASK_SECONDS.labels(model_name).observe
        )
        self.grammars = GrammarQueue(compiler, writer, send=core.send, deliver=self._deliver)
        core.connect(self._on_report, self._on_end)
        self.role = role

    def open(self, publish: Callable[[KvEventBatch], None]) -> None:
        """From now on new requests are taken; `publish` gets every batch of KV events, those so far
        included."""
        self.events.open(publish)
        self._is_open = True

    @contextlib.contextmanager
    def session(self) -> Iterator[EngineSession]:
        """A session for the length of a scope; leaving it cancels its streams."""
        session = EngineSession(self)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)
            session.abandon()

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
        self._changed.set()

    @property
    def rank_figures(self) -> list[RankFigures]:
        return self._core.rank_figures

    def load(self) -> ReplicaLoad:
        load = self.totals
        disk = self.totals.disk
        same: dict[str, Any] = {name: getattr(load, name) for name in _SAME_LOAD}
        return ReplicaLoad(
            **same,
            step=self._step,
            prefill_tps=self._rates.prefill_tps,
            itl_seconds=self._rates.itl(max(load.num_running, 1)),
            itl_seconds_per_request=self._rates.itl_per_request,
            draining=self.is_draining,
            max_running=self._ready.max_num_seqs,
            kv_seq=self.events.seq,
            seconds_per_pulled_token=load.peers.seconds_per_token
            if load.peers is not None
            else 0.0,
            role=self._role,
            num_used_disk_bytes=disk.num_bytes if disk is not None else 0,
            num_total_disk_bytes=disk.max_bytes if disk is not None else 0,
            max_chunk_tokens=self._ready.max_chunk_tokens,
        )

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
        return self._role

    @role.setter
    def role(self, role: str) -> None:
        """Routing hears of it with the next load message, which is due at once. What runs goes
        on."""
        if (role == DECODE) != (self._role == DECODE):
            self._core.send(BoundPrompts(PROMPT_SECONDS if role == DECODE else 0.0))
        self._role = role
        self.load_changed.set()

    async def sweep(self) -> None:
        """Once a second, until cancelled: cancels streams whose readers have been out of room for
        too long."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.cancel_starved(asyncio.get_running_loop().time())

    def cancel_starved(self, now: float) -> None:
        for session in self._sessions:
            session.cancel_starved(now)

    async def drain(self, seconds: float) -> tuple[int, int]:
        """Takes nothing new, hands over what would not end within so many seconds, then whatever
        has not ended, and ends the sessions.

        Returns how many streams ended by themselves and how many were handed over.
        """
        self.is_draining = True
        self.load_changed.set()
        self.prefetches.end()
        num_streams = sum(session.num_streams for session in self._sessions)
        seconds_per_token = self._rates.itl(max(self.totals.num_running, 1))
        most_tokens = seconds / seconds_per_token if seconds_per_token else math.inf
        num_cancelled = sum(session.hand_over(most_tokens) for session in self._sessions)
        await self._idle(seconds)
        num_cancelled += sum(session.hand_over(0) for session in self._sessions)
        await self._idle(_CONFIRM_SECONDS)
        for session in list(self._sessions):
            session.end()
        return num_streams - num_cancelled, num_cancelled

    async def _idle(self, seconds: float) -> None:
        """Returns when no stream is left, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not all(session.is_idle for session in self._sessions):
                    self._changed.clear()
                    await self._changed.wait()

    def _on_report(self, report: Step | Idle | Waiting) -> None:
        if isinstance(report, Step):
            self._on_step(report)
        self.load_changed.set()

    def _on_step(self, step: Step) -> None:
        output = step.output
        self._step = output.step
        self._deliver(output)
        self.grammars.on_output(output)
        if output.cache_events is not None:
            self.events.note(output.cache_events)
        self._measure(step)

    def _deliver(self, output: StepOutput) -> None:
        for session in list(self._sessions):
            try:
                session.deliver(output)
            except Exception as fault:
                # Its streams lack what this step said of them; those of other sessions go on.
                structlog.get_logger().error("a step was not delivered", exc_info=fault)
                session.end(
                    Unavailable(
                        "the engine could not send what it computed", code="step_not_delivered"
                    )
                )

    def _on_end(self) -> None:
        """The core is gone: every stream and every session ends by it."""
        self._is_open = False
        for session in list(self._sessions):
            session.end(Unavailable("the engine core has ended", code="engine_core_ended"))

    def _measure(self, step: Step) -> None:
        if step.seconds:
            self._rates.observe(step.prefill_tokens, step.decode_rows, step.seconds)
            self._step_seconds.observe(step.seconds)
            self._step_tokens.observe(step.prefill_tokens + step.decode_rows)
        now = time.perf_counter()
        for started in step.output.starts:
            self._started_at[started.key] = now
            self._queue_seconds.observe(started.queue_seconds)
            self._prefill_seconds.observe(started.prefill_seconds)
        for finished in step.output.finishes:
            if (started_at := self._started_at.pop(finished.key, None)) is not None:
                self._decode_seconds.observe(now - started_at)
        self.num_finished.update(finished.reason.value for finished in step.output.finishes)
