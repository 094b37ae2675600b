"""Requests that have a grammar, from their arrival to the core: they wait here until it is
compiled."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.step_output import Finished, StepOutput
from headwater.engine_core.system.ring import RingReader

from ...grammars.asker import Asker
from ...grammars.grammars import GrammarError
from ...runtime.errors import LimitExceeded, Unavailable
from ...runtime.tasks import log_failure
from ..core.messages import Add, Command
from .grammars import GrammarCompiler, NoTokenizer
from .masks import MaskWriter
from .token_bounds import without_bounds


class GrammarQueue:
    """`send` passes commands to the core, `deliver` passes to sessions the ends of requests that
    never reach it."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        writer: MaskWriter,
        *,
        send: Callable[[Command], None],
        deliver: Callable[[StepOutput], None],
    ) -> None:
        self._compiler = compiler
        self._writer = writer
        self._send = send
        self._deliver = deliver
        self._waiting: dict[int, tuple[NewRequest, asyncio.Task[None]]] = {}
        """Keyed by key."""

    def enter(self, request: NewRequest, grammar: bytes) -> None:
        task = asyncio.ensure_future(self._enter(request, grammar))
        task.add_done_callback(functools.partial(self._entered, request))
        self._waiting[request.key] = request, task

    def has(self, key: int) -> bool:
        """Whether the request still waits here."""
        return key in self._waiting

    def cancel(self, keys: Iterable[int]) -> None:
        """Cancels the requests that still wait; the others are the core's."""
        for key in keys:
            if (waiting := self._waiting.pop(key, None)) is not None:
                request, task = waiting
                task.cancel()
                # Called later: the caller that cancels is iterating over its streams.
                asyncio.get_running_loop().call_soon(self._end, request, FinishReason.CANCELLED, "")

    def on_output(self, output: StepOutput) -> None:
        for finished in output.finishes:
            self._writer.forget(finished.key)

    async def run(self, reports: RingReader) -> None:
        """Compiles queued grammars until cancelled, which ends the waiting requests too."""
        try:
            await self._writer.run(reports)
        finally:
            for _, task in self._waiting.values():
                task.cancel()
            self._writer.close()
            self._compiler.close()

    async def _enter(self, request: NewRequest, grammar: bytes) -> None:
        try:
            asker = Asker(request.tenant, request.namespace)
            matcher, family = await self._compiler.member(grammar, asker)
        except (LimitExceeded, Unavailable) as refusal:
            self._end(request, FinishReason.BUSY, str(refusal))
        except NoTokenizer as fault:
            self._end(request, FinishReason.ERROR, str(fault))
        except GrammarError as fault:
            self._end(
                request, FinishReason.UNFOLLOWABLE, f"the grammar cannot be followed: {fault}"
            )
        else:
            asked = request.speculation
            # Who names a drafter wants no other drafts.
            is_drafted = asked.is_on and not asked.drafter
            sampling = request.sampling
            self._writer.follow(
                request.key,
                matcher,
                family,
                request.output_ids,
                is_drafted=is_drafted,
                sampling=sampling,
            )
            self._send(Add(replace(request, sampling=without_bounds(sampling))))
        del self._waiting[request.key]

    def _entered(self, request: NewRequest, task: asyncio.Task[None]) -> None:
        """Answers the request also where compiling fails for any reason."""
        log_failure(task)
        fault = None if task.cancelled() else task.exception()
        if fault is not None and self._waiting.pop(request.key, None) is not None:
            self._end(request, FinishReason.ERROR, f"the grammar cannot be compiled: {fault!r}")

    def _end(self, request: NewRequest, reason: FinishReason, error: str) -> None:
        finished = Finished(
            key=request.key, reason=reason, num_output_tokens=len(request.output_ids), error=error
        )
        self._deliver(StepOutput(step=0, finishes=[finished]))
