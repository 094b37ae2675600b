"""The processor: text to tokens, parameters to a checked contract, prompts to block hashes.
Stateless."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import prometheus_client

from headwater.engine_core.system.usable_cores import usable_cores
from headwater.proto import processor_pb2, processor_pb2_grpc

from ..answers.reasoning_parser import REASONING_FORMATS
from ..answers.tool_formats import TOOL_FORMATS
from ..grammars.answer_grammar import answer_grammar, content_grammar
from ..grammars.asker import Asker
from ..grammars.checker import GrammarChecker
from ..grammars.enforced_calls import calls_win
from ..grammars.grammars import GrammarError
from ..grammars.offered_tools import custom_grammars, format_param
from ..grammars.structured_output import param_of
from ..models.manifest import ModelFolderError
from ..runtime.errors import BadRequest, HeadwaterError, NotFound, Unavailable
from ..runtime.fair_queue import QueueLimits
from ..runtime.fair_threads import SWITCH_SECONDS, FairThreads
from ..runtime.member import Kind
from ..runtime.process import configure_logging, in_one_line, run_stage
from ..runtime.served_model import GENERATE
from ..runtime.settings import SettingError, read_settings, setting
from ..runtime.stage_security import stages_secured
from ..runtime.tracing import NO_TRACING, Tracing, tracing_to
from ..runtime.unread_variables import warn_of_unread_variables
from ..text.chat_template import ChatTemplateError
from ..text.model import ServingChoices, TextModel, load_text_model, names_of
from ..text.stage import TextStageSettings, serve_stage
from ..text.tokenizer import lower_encoding_threads
from ..text.tokenizer_files_error import TokenizerFilesError
from ..text.tokenizer_info import tokenizer_info
from .parameters import check_defaults, check_vocabulary
from .prepare import prepare, prompt_ids
from .session import PrepareSession

ReplyT = TypeVar("ReplyT")
Request = (
    processor_pb2.PrepareRequest
    | processor_pb2.ProcessorTokenizeRequest
    | processor_pb2.ProcessorDetokenizeRequest
)
_LIBC = ctypes.CDLL(None)

LARGE_REQUEST_BYTES = 256 * 1024
"""Bytes of a request from which freed memory is given back to the system afterwards."""
LONG_REQUEST_BYTES = 8192
"""Bytes of a request from which a thread works on it, so that short requests do not wait behind
it."""
TEXT_LIMITS = QueueLimits(num_waiting=4096, num_bytes=256 << 20, wait_seconds=8.0)
"""Bounds of a tenant's long requests that wait for a thread. A request waits for its text, for its
grammar and for the check of the grammar, together less than the 30 s for which a gateway waits."""

PREPARE_SECONDS = prometheus_client.Histogram(
    "headwater_processor_seconds",
    "Time to answer one call",
    ["method"],
    buckets=(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0),
)
PROMPT_TOKENS = prometheus_client.Counter(
    "headwater_processor_prompt_tokens", "Prompt tokens prepared", ["model_name"]
)


def _names_of(formats: Iterable[str]) -> str:
    """Help of a setting that chooses one of the formats."""
    *others, last = sorted(formats)
    return f"auto (by the chat template), none, {', '.join(others)} or {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSettings(TextStageSettings):
    """The processor: turns text into checked requests of tokens."""

    dtype: str = setting("", "dtype of the engines (default: the folder's)")
    kv_format: str = setting("", "fp8 for engines with --kv-cache-dtype fp8 (default: the dtype)")
    block_size: int = setting(16, "tokens in a KV block, as on the engines")
    max_model_len: int = setting(0, "tokens of prompt and answer together (default: the model's)")
    chat_template: str = setting("", "file with a chat template (default: the model's)")
    trust_request_chat_template: bool = setting(
        False,
        "take a request's own chat template; a template can use up the processor's memory, so "
        "only where all clients are trusted",
    )
    generation_config: str = setting(
        "auto", "auto (the model's), none, or a file with sampling defaults"
    )
    tool_call_parser: str = setting("auto", _names_of(TOOL_FORMATS))
    reasoning_parser: str = setting("auto", _names_of(REASONING_FORMATS))
    escape_special_tokens: bool = setting(
        False,
        "read special tokens in messages and tools as plain text, so that no client can forge "
        "turns with them",
    )
    close_schemas: bool = setting(
        True,
        "treat objects of a JSON Schema that leaves additionalProperties out as if it were false",
    )
    warm_grammars: bool = setting(
        True,
        "read tokenizers for structured output before the processor is ready, not with the first "
        "request for it",
    )
    threads: int = setting(
        0, "threads that tokenize long texts of one tenant; 0: one for each core"
    )

    @property
    def choices(self) -> ServingChoices:
        names = [field.name for field in dataclasses.fields(ServingChoices)]
        return ServingChoices(**{name: getattr(self, name) for name in names})


NUM_CONSTRAINT_THREADS = 2
"""The second one is for another tenant: a grammar takes up to seconds to derive."""


class WorkThreads:
    """Threads for long texts: as many as one tenant may use, and one for another tenant. For
    constraints one each: this work holds the interpreter, and several such threads would take turns
    with the event loop."""

    def __init__(self, num_threads: int = 0) -> None:
        num_texts = (num_threads or usable_cores()) + 1
        self.texts = FairThreads("a thread of the processor", num_texts, TEXT_LIMITS)
        self.constraints = FairThreads(
            "the processor's thread for constraints", NUM_CONSTRAINT_THREADS, TEXT_LIMITS
        )

    def close(self) -> None:
        """Ends the threads. Work that has not begun is not done."""
        self.texts.close()
        self.constraints.close()


class Processor(processor_pb2_grpc.ProcessorServicer):
    """Answers calls; no call depends on an earlier one."""

    def __init__(
        self,
        models: Sequence[TextModel],
        threads: WorkThreads,
        checker: GrammarChecker,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._models = {model.name: model for model in models}
        self._threads = threads
        self._checker = checker
        self._tracing = tracing
        self._sessions: set[PrepareSession] = set()
        self._is_leaving = False

    def num_running(self) -> int:
        """Requests of all sessions that are not prepared yet."""
        return sum(session.num_running for session in self._sessions)

    def leave(self) -> None:
        """Ends the sessions after their running requests."""
        self._is_leaving = True
        for session in self._sessions:
            session.end()

    async def Prepare(
        self, request: processor_pb2.PrepareRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> processor_pb2.PrepareReply:
        return await self._prepare(request)

    async def PrepareSession(
        self,
        incoming: AsyncIterator[processor_pb2.PrepareFrame],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[processor_pb2.PreparedFrame]:
        if self._is_leaving:
            raise Unavailable("draining", code="draining")
        self._sessions.add(session := PrepareSession(self._answer))
        try:
            async for frame in session.run(incoming):
                yield frame
        finally:
            self._sessions.discard(session)

    async def _answer(self, call: processor_pb2.PrepareCall) -> processor_pb2.PrepareReply:
        if not call.traceparent:
            return await self._prepare(call.request)
        model = {"gen_ai.request.model": call.request.model}
        span = self._tracing.begin("Prepare", call.traceparent, call.tracestate, **model)
        fault = "cancelled"
        try:
            reply = await self._prepare(call.request)
            fault = ""
        except HeadwaterError as error:
            fault = error.code
            raise
        finally:
            span.end(fault)
        return reply

    async def _prepare(self, request: processor_pb2.PrepareRequest) -> processor_pb2.PrepareReply:
        model = self._model(request.model)
        work = functools.partial(prepare, model, request)
        if _may_be_held(request) or request.prompt.conversation.HasField("chat_template"):
            reply = await self._in_thread("Prepare", request, work)
        else:
            reply = await self._work("Prepare", request, work)
        reply.grammar = await self._grammar(model, request, reply)
        PROMPT_TOKENS.labels(model.name).inc(len(reply.prompt_ids))
        return reply

    async def Tokenize(
        self,
        request: processor_pb2.ProcessorTokenizeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> processor_pb2.ProcessorTokenizeReply:
        work = functools.partial(tokenize, self._model(request.model), request)
        return await self._work("Tokenize", request, work)

    async def Detokenize(
        self,
        request: processor_pb2.ProcessorDetokenizeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> processor_pb2.ProcessorDetokenizeReply:
        work = functools.partial(detokenize, self._model(request.model), request)
        return await self._work("Detokenize", request, work)

    async def TokenizerInfo(
        self,
        request: processor_pb2.ProcessorTokenizerInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> processor_pb2.ProcessorTokenizerInfoReply:
        model = self._model(request.model)
        return processor_pb2.ProcessorTokenizerInfoReply(
            info_json=json.dumps(tokenizer_info(model), ensure_ascii=False),
            tool_parser=model.tool_format,
            reasoning_parser=model.reasoning_format,
            architecture=model.architecture,
        )

    async def ListModels(
        self,
        request: processor_pb2.ProcessorModelsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> processor_pb2.ProcessorModelsReply:
        return processor_pb2.ProcessorModelsReply(
            models=[model.served.to_pb() for model in self._models.values()]
        )

    async def _grammar(
        self,
        model: TextModel,
        request: processor_pb2.PrepareRequest,
        reply: processor_pb2.PrepareReply,
    ) -> bytes:
        """Constraint on the answer, checked to compile; empty where the answer is free. Raises
        `BadRequest`."""
        if not _may_be_held(request):
            return b""
        derive = functools.partial(answer_grammar, model, request, reply)
        grammar = await self._derived(request, derive)
        if not grammar:
            return b""
        try:
            await self._checker.check(model.folder, grammar, _asker(request))
        except GrammarError as fault:
            param = await self._at_fault(model, request, reply.answer_format.tool_parser)
            raise BadRequest(
                param, f"{param} cannot be followed: {fault}", code="invalid_grammar"
            ) from None
        return grammar.encode()

    async def _at_fault(
        self, model: TextModel, request: processor_pb2.PrepareRequest, tool_format: str
    ) -> str:
        """Name of the field that cannot be compiled: of tools and structured output, the one that
        fails alone too."""
        sampling = request.sampling
        if sampling.HasField("structured_output") and not request.prompt.conversation.tools:
            return param_of(sampling.structured_output)
        derive = functools.partial(_grammars_by_field, model, request, tool_format)
        grammars = await self._derived(request, derive)
        for param, grammar in grammars:
            try:
                await self._checker.check(model.folder, grammar, _asker(request))
            except GrammarError:
                return param
        return "tools"

    def _model(self, name: str) -> TextModel:
        if name not in self._models:
            raise NotFound("model", name)
        return self._models[name]

    async def _work(self, method: str, request: Request, work: Callable[[], ReplyT]) -> ReplyT:
        """Does short work at once, and other work in a thread."""
        if request.ByteSize() >= LONG_REQUEST_BYTES:
            return await self._in_thread(method, request, work)
        started = time.perf_counter()
        reply = work()
        PREPARE_SECONDS.labels(method).observe(time.perf_counter() - started)
        return reply

    async def _in_thread(self, method: str, request: Request, work: Callable[[], ReplyT]) -> ReplyT:
        return await _timed(self._threads.texts, method, request, work)

    async def _derived(
        self, request: processor_pb2.PrepareRequest, work: Callable[[], ReplyT]
    ) -> ReplyT:
        return await _timed(self._threads.constraints, "Grammar", request, work)


async def _timed(
    threads: FairThreads, method: str, request: Request, work: Callable[[], ReplyT]
) -> ReplyT:
    """Returns what `work` on the request returns, from one of the threads."""
    started = time.perf_counter()
    num_bytes = request.ByteSize()
    whole = functools.partial(_and_trim, work) if num_bytes >= LARGE_REQUEST_BYTES else work
    reply = await threads.run(request.tenant, num_bytes, whole)
    PREPARE_SECONDS.labels(method).observe(time.perf_counter() - started)
    return reply


def _may_be_held(request: processor_pb2.PrepareRequest) -> bool:
    """Whether a grammar may hold the answer. To derive one takes up to seconds, of a short request
    too, and to write its tools into the prompt takes milliseconds."""
    sampling = request.sampling
    return (
        sampling.HasField("structured_output")
        or sampling.HasField("thinking_token_budget")
        or bool(request.prompt.conversation.tools)
    )


def _grammars_by_field(
    model: TextModel, request: processor_pb2.PrepareRequest, tool_format: str
) -> list[tuple[str, str]]:
    """Fields that make a grammar of their own, each with that grammar."""
    conversation = request.prompt.conversation
    grammars = []
    if request.sampling.HasField("structured_output") and not calls_win(conversation, tool_format):
        asked = request.sampling.structured_output
        grammars.append((param_of(asked), content_grammar(model, asked)))
    for i, grammar in custom_grammars(conversation):
        grammars.append((format_param(i), grammar))
    return grammars


def _asker(request: processor_pb2.PrepareRequest) -> Asker:
    return Asker(request.tenant, request.cache_namespace)


def _and_trim(work: Callable[[], ReplyT]) -> ReplyT:
    """Runs `work`, then returns the allocator's unused memory to the system. NOTE: only glibc keeps
    so much, and offers a call for it."""
    try:
        return work()
    finally:
        if (trim := getattr(_LIBC, "malloc_trim", None)) is not None:
            trim(0)


def tokenize(
    model: TextModel, request: processor_pb2.ProcessorTokenizeRequest
) -> processor_pb2.ProcessorTokenizeReply:
    token_ids = prompt_ids(model, request)
    spelled = model.tokenizer.table.bytes_of if request.return_token_strings else []
    return processor_pb2.ProcessorTokenizeReply(
        token_ids=token_ids,
        max_model_len=model.limits.max_model_len,
        token_strings=[spelled[token_id].decode(errors="replace") for token_id in token_ids]
        if spelled
        else [],
    )


def detokenize(
    model: TextModel, request: processor_pb2.ProcessorDetokenizeRequest
) -> processor_pb2.ProcessorDetokenizeReply:
    check_vocabulary("tokens", request.token_ids, model.limits.vocab_size)
    return processor_pb2.ProcessorDetokenizeReply(text=model.tokenizer.decode(request.token_ids))


async def serve(settings: ProcessorSettings) -> None:
    """Runs the stage from settings to the last answer."""
    folders = names_of(settings.model_folder, settings.served_model_name)
    models = [load_text_model(path, name, settings.choices) for path, name in folders]
    for model in models:
        _check_own_defaults(model, settings.generation_config)
    with (
        tracing_to(settings.otlp_endpoint, "processor", settings.replica_id) as tracing,
        contextlib.closing(WorkThreads(settings.threads)) as threads,
    ):
        async with GrammarChecker() as checker:
            if settings.warm_grammars:
                for folder in {model.folder for model in models if model.task == GENERATE}:
                    await checker.warm(folder)
            servicer = Processor(models, threads, checker, tracing)
            add = functools.partial(processor_pb2_grpc.add_ProcessorServicer_to_server, servicer)
            served = [model.served for model in models]
            await serve_stage(
                settings,
                Kind.PROCESSOR,
                served,
                add,
                servicer.leave,
                tracing,
                num_running=servicer.num_running,
            )


def _check_own_defaults(model: TextModel, choice: str) -> None:
    """Raises `SettingError` for sampling defaults with which every request that does not override
    them would fail."""
    try:
        check_defaults(model.limits)
    except BadRequest as error:
        allowed = f"none, or defaults that requests may have; of the model {model.name!r} {error}"
        raise SettingError("generation_config", choice, allowed) from None


def main() -> None:
    with in_one_line(
        "processor", SettingError, ModelFolderError, TokenizerFilesError, ChatTemplateError, OSError
    ):
        settings = read_settings(ProcessorSettings, sys.argv[1:], prog="headwater serve processor")
        configure_logging("processor", settings.log_level)
        warn_of_unread_variables()
        sys.setswitchinterval(SWITCH_SECONDS)
        lower_encoding_threads()
        with stages_secured(settings):
            run_stage(serve(settings))


if __name__ == "__main__":
    main()
