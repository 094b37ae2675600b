"""One request at an engine of this process, from its prompt to its answers."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator

from headwater.proto import common_pb2, processor_pb2
from headwater.proto.common_pb2 import Pooling
from headwater.proto.engine_pb2 import Add
from headwater.proto.output_processor_pb2 import Open, OutputFinish

from ..grammars.answer_grammar import answer_grammar
from ..output_processor.stream import OutputStream
from ..output_processor.text_plan import TextPlan
from ..processor.prepare import prepare
from ..runtime.errors import BadRequest, HeadwaterError, Unavailable
from ..text.model import TextModel
from .answer_sink import AnswerSink
from .local_engine import LocalEngine
from .outputs import EmbeddingOutput, RequestOutput
from .prompts import TextOrIds

NAMESPACE = bytes(16)
"""Root of the prefix cache: one program is one tenant."""
CREDIT = 1 << 30
"""Number of tokens that an answer may have before its reader takes any: all of them."""
ANSWERED = common_pb2.POOLING_UNSPECIFIED
"""Pooling of a request that is answered, not embedded."""


class LocalRequest:
    """A request that is prepared: `reply` is the processor's."""

    def __init__(
        self, request_id: str, model: TextModel, reply: processor_pb2.PrepareReply
    ) -> None:
        self.request_id = request_id
        self.sink = AnswerSink(reply.sampling.n)
        self._model = model
        self._reply = reply

    @classmethod
    def prepared(
        cls,
        request_id: str,
        model: TextModel,
        prompt: processor_pb2.Prompt,
        sampling: common_pb2.Sampling,
        pooling: Pooling.ValueType = ANSWERED,
    ) -> LocalRequest:
        """Raises `BadRequest` for what the contract refuses, and for a grammar that cannot be
        followed."""
        if not sampling.HasField("seed"):
            sampling.seed = secrets.randbits(63)
        request = processor_pb2.PrepareRequest(
            model=model.name,
            prompt=prompt,
            sampling=sampling,
            cache_namespace=NAMESPACE,
            pooling=pooling,
        )
        reply = prepare(model, request)
        reply.grammar = answer_grammar(model, request, reply).encode()
        return cls(request_id, model, reply)

    @contextlib.contextmanager
    def running(self, engine: LocalEngine) -> Iterator[None]:
        """Runs at the engine inside the `with` block. Raises `Unavailable`."""
        opening = self._opening()
        form = self._reply.answer_format if self._reply.HasField("answer_format") else None
        plan = TextPlan.of(opening.add, self._model.tokenizer.table, form)
        streams = [
            OutputStream(self.sink, choice.index, plan, CREDIT, choice.index)
            for choice in self.sink.choices
        ]
        at_engine = engine.open(opening, streams)
        try:
            yield
        finally:
            engine.cancel(at_engine)

    async def until_changed(self) -> None:
        """Returns when output has come. Raises as `until_ended` does."""
        await self.sink.changed.wait()
        self.sink.changed.clear()
        if (failure := self.sink.failure) is not None:
            raise _error_of(failure)

    async def until_ended(self) -> None:
        """Returns when all choices have ended. Raises `BadRequest` for a request that the engine
        cannot answer, `Unavailable` for an engine that has ended."""
        while not self.sink.has_ended:
            await self.until_changed()

    def output(self, prompt: TextOrIds | None) -> RequestOutput:
        """Answers so far; `prompt` is the prompt as it was given."""
        sampling = self._reply.sampling
        has_prompt_scores = sampling.HasField("prompt_logprobs")
        return RequestOutput(
            request_id=self.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=[None, *self.sink.prompt_logprobs] if has_prompt_scores else None,
            outputs=[choice.output(has_logprobs=sampling.logprobs) for choice in self.sink.choices],
            finished=self.sink.has_ended,
            num_cached_tokens=self.sink.cached_tokens,
        )

    def embedding(self, dimensions: int | None, *, normalize: bool) -> EmbeddingOutput:
        """Vector of the prompt. Raises `BadRequest` for more dimensions than the model has."""
        vector = self.sink.vector
        if dimensions is not None and not 1 <= dimensions <= len(vector):
            raise BadRequest.of("dimensions", dimensions, f"1…{len(vector)}, the hidden size")
        values = vector[:dimensions]
        length = math.hypot(*values) if normalize else 1.0
        return EmbeddingOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            embedding=[value / length for value in values] if length else values,
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self._reply.prompt_ids)

    def _opening(self) -> Open:
        reply = self._reply
        num_choices = len(self.sink.choices)
        add = Add(
            request_id=self.request_id,
            num_prompt_tokens=len(reply.prompt_ids),
            prompt_ids=reply.prompt_ids,
            sampling=reply.sampling,
            eos_token_ids=reply.eos_token_ids,
            bad_word_ids=reply.bad_word_ids,
            grammar=reply.grammar,
            num_grammar_bytes=len(reply.grammar),
            choice_indices=range(num_choices),
            weight=1.0,
            cache_namespace=NAMESPACE,
            credit=CREDIT,
            pooling=reply.pooling,
            second_start=reply.second_start,
            attended_len=reply.attended_len,
            forks=num_choices > 1,
        )
        return Open(model=self._model.name, add=add)


def _error_of(finish: OutputFinish) -> HeadwaterError:
    """Error of an answer that failed."""
    match finish.cause:
        case common_pb2.LOSS_CAUSE_GRAMMAR:
            return BadRequest("structured_outputs", finish.error, code="invalid_grammar")
        case common_pb2.LOSS_CAUSE_UNSPECIFIED:
            return BadRequest(None, finish.error)
        case _:
            return Unavailable(finish.error)
