"""Reachable processors, and the models that they serve. Any of them serves a call: they have no
state between calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TypeVar

import grpc
import structlog

from headwater.proto import processor_pb2, processor_pb2_grpc
from headwater.services.runtime import errors, grpc_errors
from headwater.services.runtime.call_proof import Impostor, StageChannel
from headwater.services.runtime.channel import MAX_TEXT_BYTES, open_channel
from headwater.services.runtime.fair_threads import STAGE_BUSY
from headwater.services.runtime.rare_log import RareLog
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.tasks import end, log_failure, set_within, start_in
from headwater.services.runtime.trace_context import TraceContext
from headwater.services.runtime.tracing import Span

from .prepare_session import MAX_CALL_BYTES, NoSessions, PrepareSession

CALL_SECONDS = 30.0
RETURN_SECONDS = 30.0
"""Seconds that a request waits for a processor that was there: one that died is restarted, unseen
by clients. On busy cores it takes more than ten to import its libraries and to read the
tokenizer."""
GONE = ("unavailable", "processor_unavailable", "draining")
"""Status codes of failures of the processor, not of the request."""
MOST_LOST = 2
"""Number of processors that may be lost with one request: it may be the cause of their death."""
ASK_SECONDS = 2.0
IMPOSTOR_SECONDS = 1.0
"""Seconds before a process that has not proven itself is asked again."""
_rare_log = RareLog()
ReplyT = TypeVar("ReplyT")


@dataclass(slots=True)
class Processor:
    """A connection to one processor."""

    address: str
    channel: StageChannel
    stub: processor_pb2_grpc.ProcessorAsyncStub
    session: PrepareSession
    models: dict[str, ServedModel] = field(default_factory=dict)
    since: int = 0
    num_running: int = 0


class Processors:
    """Pool of processors: calls go to the least busy one that serves the model, or to another one
    if that is out of reach."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when a processor has reported its models."""
        self._pool: dict[str, Processor] = {}
        self._tasks: dict[str, tuple[asyncio.Task[None], ...]] = {}
        """Tasks that ask a processor for its models, and that run its session."""
        self._news = asyncio.Event()
        """Set, and replaced by another event, when a processor came within reach."""
        self._closing: set[asyncio.Task[None]] = set()

    def join(self, address: str) -> None:
        if address not in self._pool:
            channel = open_channel(address, ("grpc.max_receive_message_length", MAX_TEXT_BYTES))
            stub = processor_pb2_grpc.ProcessorStub(channel)
            opened = asyncio.Event()

            def on_open() -> None:
                opened.set()
                self._emit()

            session = PrepareSession(address, channel, stub, on_open=on_open)
            self._pool[address] = processor = Processor(
                address, channel, stub, session, since=int(time.time())
            )
            asker = asyncio.create_task(self._follow_models(processor, opened))
            self._tasks[address] = asker, asyncio.create_task(session.run())
            for task in self._tasks[address]:
                task.add_done_callback(log_failure)

    def leave(self, address: str) -> None:
        if (processor := self._pool.pop(address, None)) is not None:
            asker, carrier = self._tasks.pop(address)
            asker.cancel()
            start_in(self._closing, _close(processor, carrier))

    def models(self) -> dict[str, tuple[ServedModel, int]]:
        """Models by name, each with the time since which it is served (seconds since 1970)."""
        served: dict[str, tuple[ServedModel, int]] = {}
        for processor in self._pool.values():
            for name, model in processor.models.items():
                served.setdefault(name, (model, processor.since))
        return served

    def serves(self, name: str) -> bool:
        return any(name in processor.models for processor in self._pool.values())

    def model(self, name: str) -> ServedModel:
        """Model by name. Raises `NotFound`, or `Unavailable` while no processor is known."""
        for processor in self._pool.values():
            if name in processor.models:
                return processor.models[name]
        if not any(processor.models for processor in self._pool.values()):
            raise errors.Unavailable("no processor is within reach", code="processor_unavailable")
        raise self.unknown(name)

    def unknown(self, name: str) -> errors.NotFound:
        """The error for a model that is not served."""
        return errors.NotFound("model", name, sorted(self.models()))

    def only_model(self) -> str:
        """Name of the model that a client need not name. Raises `BadRequest` where there are
        several, `Unavailable` while no processor is known."""
        served = sorted(self.models())
        if not served:
            raise errors.Unavailable("no processor is within reach", code="processor_unavailable")
        if len(served) > 1:
            named = ", ".join(served[: errors.MAX_NAMED])
            raise errors.BadRequest(
                "model", f"model is missing; allowed: one of {named}", code="missing_field"
            )
        return served[0]

    async def prepare(
        self, request: processor_pb2.PrepareRequest, span: Span
    ) -> processor_pb2.PrepareReply:
        # Only a collector of spans reads it.
        context = span.context if span.context.is_sampled else None
        send = partial(_prepared, request=request, context=context)
        return await self._call(request.model, send)

    async def tokenize(
        self, request: processor_pb2.ProcessorTokenizeRequest
    ) -> processor_pb2.ProcessorTokenizeReply:
        return await self._call(
            request.model, lambda processor: processor.stub.Tokenize(request, timeout=CALL_SECONDS)
        )

    async def detokenize(
        self, request: processor_pb2.ProcessorDetokenizeRequest
    ) -> processor_pb2.ProcessorDetokenizeReply:
        """Text of token ids. Raises `BadRequest` for more ids than the model's context holds, which
        no answer can have."""
        num_ids = len(request.token_ids)
        allowed = self.model(request.model).max_model_len
        if num_ids > allowed:
            raise errors.BadRequest(
                "tokens",
                f"tokens has {num_ids} ids; allowed: at most {allowed}, the model's context",
            )
        return await self._call(
            request.model,
            lambda processor: processor.stub.Detokenize(request, timeout=CALL_SECONDS),
        )

    async def tokenizer_info(self, model: str) -> processor_pb2.ProcessorTokenizerInfoReply:
        request = processor_pb2.ProcessorTokenizerInfoRequest(model=model)
        return await self._call(
            model, lambda processor: processor.stub.TokenizerInfo(request, timeout=CALL_SECONDS)
        )

    async def _call(self, model: str, send: Callable[[Processor], Awaitable[ReplyT]]) -> ReplyT:
        """Calls a processor. Raises the named error of the stage. A processor out of reach is
        followed by another, since calls keep nothing, and where there is none, by the next one that
        comes."""
        self.model(model)
        end = time.monotonic() + RETURN_SECONDS
        num_lost = 0
        while True:
            news = self._news
            problem: errors.Unavailable | None = None
            try:
                for processor in self._by_load(model):
                    was_there = processor.session.is_open
                    if not was_there and processor.channel.asks_for_proof:
                        # A session proves the identity of the process before a prompt is sent; a
                        # single call would send the prompt first.
                        continue
                    try:
                        return await _called(processor, send)
                    except errors.Unavailable as error:
                        if error.code == STAGE_BUSY:
                            # The request has waited long enough.
                            raise
                        num_lost += was_there
                        if error.code not in GONE:
                            problem = error
                        if num_lost == MOST_LOST:
                            raise problem or _gone() from None
                if problem is not None or not await set_within(news, end - time.monotonic()):
                    raise problem or _gone()
            finally:
                # A frame that keeps what it raises keeps itself, and the prompt, until garbage is
                # collected.
                del problem

    def _by_load(self, model: str) -> list[Processor]:
        serving = [processor for processor in self._pool.values() if model in processor.models]
        serving.sort(key=attrgetter("num_running"))
        return serving

    async def _follow_models(self, processor: Processor, opened: asyncio.Event) -> None:
        """Asks the processor for its models, and again after each new session, since a restarted
        process may serve other models."""
        while True:
            await _ask_models(processor)
            self._emit()
            await opened.wait()
            opened.clear()

    def _emit(self) -> None:
        news = self._news
        self._news = asyncio.Event()
        news.set()
        self.on_change()

    async def close(self) -> None:
        for address in list(self._pool):
            self.leave(address)
        await asyncio.gather(*self._closing)


def _gone() -> errors.Unavailable:
    return errors.Unavailable("the processor is gone", code="processor_unavailable")


async def _prepared(
    processor: Processor, request: processor_pb2.PrepareRequest, context: TraceContext | None
) -> processor_pb2.PrepareReply:
    if processor.session.is_open and request.ByteSize() <= MAX_CALL_BYTES:
        call = processor_pb2.PrepareCall(request=request)
        if context is not None:
            call.traceparent = context.traceparent
            call.tracestate = context.tracestate
        try:
            return await processor.session.prepare(call, CALL_SECONDS)
        except NoSessions:
            # Has a call of its own then.
            pass
    metadata = None
    if context is not None:
        metadata = (("traceparent", context.traceparent), ("tracestate", context.tracestate))
    return await processor.stub.Prepare(request, timeout=CALL_SECONDS, metadata=metadata)


async def _called(processor: Processor, send: Callable[[Processor], Awaitable[ReplyT]]) -> ReplyT:
    """Counts and logs a call. Raises the named error of the stage."""
    processor.num_running += 1
    try:
        return await send(processor)
    except grpc.aio.AioRpcError as failure:
        raise _noted(processor, grpc_errors.from_rpc_error(failure)) from None
    except errors.Unavailable as error:
        _noted(processor, error)
        raise
    finally:
        processor.num_running -= 1


def _noted(processor: Processor, error: errors.HeadwaterError) -> errors.HeadwaterError:
    """The error, logged where it says that the processor is out of reach."""
    if isinstance(error, errors.Unavailable) and error.code != STAGE_BUSY:
        _rare_log.add(
            "processor out of reach",
            processor.address,
            address=processor.address,
            problem=str(error),
        )
    return error


async def _ask_models(processor: Processor) -> None:
    """Asks a processor for its models until it answers: a seed may start after the gateway."""
    while True:
        try:
            call = processor.stub.ListModels(
                processor_pb2.ProcessorModelsRequest(), timeout=ASK_SECONDS, wait_for_ready=True
            )
            await processor.channel.proven(call)
            reply = await call
        except grpc.aio.AioRpcError as failure:
            structlog.get_logger().debug(
                "processor does not answer", address=processor.address, code=failure.code().name
            )
            await asyncio.sleep(0.1)
        except Impostor as stranger:
            structlog.get_logger().debug("processor not believed", problem=str(stranger))
            await asyncio.sleep(IMPOSTOR_SECONDS)
        else:
            processor.models = {model.name: ServedModel.from_pb(model) for model in reply.models}
            return


async def _close(processor: Processor, carrier: asyncio.Task[None]) -> None:
    """Closes a processor's connection after its running calls and its session have ended."""
    await processor.session.answered(CALL_SECONDS)
    await end(carrier)
    await processor.channel.close(grace=CALL_SECONDS if processor.num_running else None)
