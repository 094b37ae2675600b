"""`AsyncLLM`: a model and its engine for programs that have an event loop. Answers are streamed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self

import structlog

from headwater.proto import common_pb2, processor_pb2

from ..models.demo_model import DEMO_NAME
from ..models.manifest import ModelManifest
from ..runtime.errors import BadRequest, Unavailable
from ..runtime.progress import Report, silent
from ..text.model import TextModel, load_text_model
from .local_engine import LocalEngine
from .local_request import LocalRequest
from .outputs import EmbeddingOutput, RequestOutput
from .prompts import Message, TextOrIds, conversation_to_pb, prompt_to_pb
from .sampling_params import SamplingParams
from .settings import LLMSettings

POOLINGS = {
    "model": common_pb2.POOLING_MODEL,
    "last": common_pb2.POOLING_LAST,
    "mean": common_pb2.POOLING_MEAN,
    "cls": common_pb2.POOLING_CLS,
}
DEFAULTS = SamplingParams()


class AsyncLLM:
    """Use as an asynchronous context manager, or call `start` and `close`.

    `settings` are those of `headwater serve engine` and of a processor by their names
    (`max_model_len=4096`), and `revision`, `cache_dir` and `calibration` as `headwater pull` takes
    them.
    """

    def __init__(
        self, model: str = DEMO_NAME, *, on_progress: Report = silent, **settings: Any
    ) -> None:
        """`on_progress` is called while the model is pulled, from another thread. Raises
        `SettingError` for unknown settings and for values that are not allowed."""
        self._settings = LLMSettings.of(model, settings)
        self._on_progress = on_progress
        self._scope = contextlib.AsyncExitStack()
        self._ids = itertools.count(1)
        self._engine: LocalEngine | None = None
        self._model: TextModel | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Pulls the model and starts its engine. Raises what pulling raises, and `CoreFailed`."""
        _log_warnings_alone()
        folder = await asyncio.to_thread(self._settings.pull, self._on_progress)
        settings = await asyncio.to_thread(self._settings.engine_of, folder, self._on_progress)
        name = ModelManifest.read(folder).name
        model = await asyncio.to_thread(load_text_model, folder, name, self._settings.text)
        # Built now, so that the first request does not wait for it.
        assert len(model.tokenizer.table)
        self._engine = await self._scope.enter_async_context(LocalEngine.running(settings))
        ready = self._engine.ready
        self._model = dataclasses.replace(
            model,
            served=dataclasses.replace(model.served, block_size=ready.block_size),
            limits=dataclasses.replace(model.limits, max_model_len=ready.max_model_len),
        )

    async def close(self) -> None:
        """Ends the engine, and the requests that still run."""
        self._engine = None
        await self._scope.aclose()

    @property
    def max_num_seqs(self) -> int:
        """Largest number of answers that the engine computes at once. Raises `Unavailable`."""
        engine, _ = self._started()
        return engine.ready.max_num_seqs

    async def generate(
        self, prompt: TextOrIds, sampling_params: SamplingParams = DEFAULTS
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answers to a prompt as they grow: each output holds all so far, the last one
        is finished. A caller that stops iterating ends the request. Raises `BadRequest`."""
        async for output in self._streamed(prompt_to_pb(prompt), sampling_params, prompt):
            yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams = DEFAULTS,
        **conversation: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answers to a conversation, as `generate` does. `conversation`: `tools`,
        `tool_choice`, `chat_template`, `chat_template_kwargs`, `reasoning_effort`,
        `add_generation_prompt` and `continue_final_message`."""
        prompt = conversation_to_pb(messages, **conversation)
        async for output in self._streamed(prompt, sampling_params, None):
            yield output

    async def embed(
        self,
        prompt: TextOrIds,
        *,
        pooling: str = "model",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> EmbeddingOutput:
        """Vector of a prompt, of length 1 unless `normalize` is false. `pooling` is `last`, `mean`,
        `cls`, or `model`: what its files say, else `last`. `dimensions` keeps the first values, so
        many. Raises `BadRequest`."""
        BadRequest.unless(pooling in POOLINGS, "pooling", pooling, ", ".join(POOLINGS))
        engine, model = self._started()
        sampling = common_pb2.Sampling()
        how = POOLINGS[pooling]
        request = LocalRequest.prepared(self._id(), model, prompt_to_pb(prompt), sampling, how)
        is_one = model.late_interaction is None or pooling != "model"
        BadRequest.unless(is_one, "pooling", pooling, "last, mean or cls: its own is by token")
        with request.running(engine):
            await request.until_ended()
        return request.embedding(dimensions, normalize=normalize)

    async def answer(
        self,
        prompt: processor_pb2.Prompt,
        sampling_params: SamplingParams,
        given: TextOrIds | None = None,
    ) -> RequestOutput:
        """Whole answers to a prompt, which was `given` in this form. Raises `BadRequest`."""
        engine, model = self._started()
        request = LocalRequest.prepared(self._id(), model, prompt, sampling_params.to_pb())
        with request.running(engine):
            await request.until_ended()
        return request.output(given)

    async def _streamed(
        self,
        prompt: processor_pb2.Prompt,
        sampling_params: SamplingParams,
        given: TextOrIds | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        engine, model = self._started()
        request = LocalRequest.prepared(self._id(), model, prompt, sampling_params.to_pb())
        with request.running(engine):
            while not request.sink.has_ended:
                await request.until_changed()
                yield request.output(given)

    def _started(self) -> tuple[LocalEngine, TextModel]:
        if self._engine is None or self._model is None:
            raise Unavailable("the model is not started, or closed", code="not_started")
        return self._engine, self._model

    def _id(self) -> str:
        return str(next(self._ids))


def _log_warnings_alone() -> None:
    """Keeps an engine's progress out of a program's output, unless the program has set up its logs
    itself."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
