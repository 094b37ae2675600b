"""`LLM`: a model and its engine for programs and notebooks. Lists in, lists out."""

from __future__ import annotations

import asyncio
import operator
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from rich.console import Console

from headwater.proto import processor_pb2

from ..models.demo_model import DEMO_NAME
from ..runtime.errors import BadRequest, HeadwaterError
from ..runtime.progress import ProgressBars, Report, silent
from .async_llm import DEFAULTS, AsyncLLM
from .loop_thread import LoopThread
from .outputs import EmbeddingOutput, RequestOutput
from .prompts import (
    Message,
    TextOrIds,
    conversation_to_pb,
    conversations_of,
    prompt_to_pb,
    prompts_of,
)
from .sampling_params import SamplingParams

SEATS_AHEAD = 2
"""Number of open requests as a multiple of the requests that the engine runs at once, so that
prepared requests are waiting when one ends."""
ResultT = TypeVar("ResultT")
ManyParams = SamplingParams | Sequence[SamplingParams]


class LLM:
    """Use as a context manager, or call `close`; the engine ends with the process in any case.

    Arguments are those of `AsyncLLM`. `show_progress` draws bars on standard error while a model
    is pulled and while requests are answered.
    """

    def __init__(
        self, model: str = DEMO_NAME, *, show_progress: bool = True, **settings: Any
    ) -> None:
        """Raises `SettingError`, what pulling raises, and `CoreFailed`."""
        self._console = Console(stderr=True, quiet=not show_progress)
        with ProgressBars(self._console) as bars:
            self._llm = AsyncLLM(model, on_progress=bars.report, **settings)
            self._thread = LoopThread("headwater")
            try:
                self._thread.run(self._llm.start())
            except BaseException:
                _close(self._thread, self._llm)
                raise
        self._finalizer = weakref.finalize(self, _close, self._thread, self._llm)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine. A second call does nothing."""
        self._finalizer()

    def generate(
        self, prompts: TextOrIds | Sequence[TextOrIds], sampling_params: ManyParams = DEFAULTS
    ) -> list[RequestOutput]:
        """Answers to prompts (texts, or lists of token ids), in their order. `sampling_params` is
        one for all, or one for each. Raises `BadRequest` of the first request that cannot be
        served; the others end with it."""
        given = prompts_of(prompts)
        asked = [prompt_to_pb(prompt) for prompt in given]
        return self._answers(asked, sampling_params, given)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ManyParams = DEFAULTS,
        **conversation: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, in their order. `conversation` as in
        `AsyncLLM.chat`, the same for all. Raises as `generate` does."""
        given = conversations_of(messages)
        asked = [conversation_to_pb(each, **conversation) for each in given]
        return self._answers(asked, sampling_params, [None] * len(asked))

    def embed(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        *,
        pooling: str = "model",
        dimensions: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Vectors of length 1, in the order of the prompts. Raises `BadRequest`."""
        return self._vectors(prompts, pooling=pooling, dimensions=dimensions, normalize=True)

    def encode(
        self, prompts: TextOrIds | Sequence[TextOrIds], *, pooling: str = "model"
    ) -> list[EmbeddingOutput]:
        """Pooled hidden states as the model computes them, in the order of the prompts. Raises
        `BadRequest`."""
        return self._vectors(prompts, pooling=pooling, dimensions=None, normalize=False)

    def score(
        self,
        first: TextOrIds | Sequence[TextOrIds],
        second: TextOrIds | Sequence[TextOrIds],
        *,
        pooling: str = "model",
    ) -> list[float]:
        """Cosine similarities −1…1 of the prompts of `first` and `second` in pairs; one prompt is
        paired with each of the others. Raises `BadRequest`."""
        firsts = prompts_of(first)
        seconds = prompts_of(second)
        if len(firsts) != len(seconds) and len(firsts) != 1:
            allowed = f"one prompt, or as many as the second ones ({len(seconds)})"
            raise BadRequest.of("first", f"{len(firsts)} prompts", allowed)
        outputs = self.embed([*firsts, *seconds], pooling=pooling)
        vectors = [output.embedding for output in outputs]
        left = vectors[: len(firsts)] * (len(seconds) if len(firsts) == 1 else 1)
        right = vectors[len(firsts) :]
        return [sum(map(operator.mul, *pair)) for pair in zip(left, right, strict=True)]

    def _answers(
        self,
        prompts: Sequence[processor_pb2.Prompt],
        sampling_params: ManyParams,
        given: Sequence[TextOrIds | None],
    ) -> list[RequestOutput]:
        params = (
            [sampling_params] * len(prompts)
            if isinstance(sampling_params, SamplingParams)
            else list(sampling_params)
        )
        if len(params) != len(prompts):
            allowed = f"one, or as many as prompts ({len(prompts)})"
            raise BadRequest.of("sampling_params", f"{len(params)} of them", allowed)

        def work(i: int) -> Coroutine[Any, Any, RequestOutput]:
            return self._llm.answer(prompts[i], params[i], given[i])

        return self._all(work, len(prompts))

    def _vectors(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        *,
        pooling: str,
        dimensions: int | None,
        normalize: bool,
    ) -> list[EmbeddingOutput]:
        given = prompts_of(prompts)

        def work(i: int) -> Coroutine[Any, Any, EmbeddingOutput]:
            return self._llm.embed(
                given[i], pooling=pooling, dimensions=dimensions, normalize=normalize
            )

        return self._all(work, len(given))

    def _all(
        self, work: Callable[[int], Coroutine[Any, Any, ResultT]], num_requests: int
    ) -> list[ResultT]:
        """Results of `work(0)`, `work(1)` …, with a progress bar where there are several."""
        with ProgressBars(self._console) as bars:
            report = bars.report if num_requests > 1 else silent
            return self._thread.run(_in_turns(work, num_requests, self._llm.max_num_seqs, report))


async def _in_turns(
    work: Callable[[int], Coroutine[Any, Any, ResultT]],
    num_requests: int,
    num_seats: int,
    report: Report,
) -> list[ResultT]:
    """Runs requests, as many at once as keep the engine busy. Raises the error of the first that
    fails, with its number as a note, when the others have ended."""
    turns = asyncio.Semaphore(SEATS_AHEAD * num_seats)
    num_done = 0

    async def run(i: int) -> ResultT:
        nonlocal num_done
        async with turns:
            try:
                result = await work(i)
            except HeadwaterError as error:
                if num_requests > 1:
                    error.add_note(f"It was request {i} of {num_requests}, counted from 0.")
                raise
        num_done += 1
        report("requests", num_done, num_requests)
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(i)) for i in range(num_requests)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _close(thread: LoopThread, llm: AsyncLLM) -> None:
    thread.run(llm.close())
    thread.close()
