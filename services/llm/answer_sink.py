"""Gathers the output of one request's choices. Knows nothing about engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from headwater.proto import common_pb2
from headwater.proto.common_pb2 import Embedding, TokenLogprob
from headwater.proto.engine_pb2 import Start
from headwater.proto.output_processor_pb2 import OutputFinish, OutputPromptLogprobs, RowParts

from .outputs import CompletionOutput, Logprob, TokenLogprobs, ToolCall

FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
"""Reasons of an answer that has not failed."""


class GatheredChoice:
    """Output of one choice so far."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish: OutputFinish | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._logprobs: list[TokenLogprobs] = []
        self._sum_logprob = 0.0

    def add_row(self, token_ids: Sequence[int], text: str) -> None:
        self.token_ids += token_ids
        if text:
            self._texts.append(text)

    def add_parts(self, parts: RowParts) -> None:
        if parts.reasoning:
            self._thoughts.append(parts.reasoning)
        for delta in parts.tool_calls:
            before = self._calls.get(delta.index, ToolCall(id="", name="", arguments=""))
            self._calls[delta.index] = ToolCall(
                id=before.id or delta.id,
                name=before.name or delta.name,
                arguments=before.arguments + delta.arguments,
            )

    def add_logprobs(self, tokens: Iterable[TokenLogprob]) -> None:
        for token in tokens:
            self._sum_logprob += token.chosen.logprob
            self._logprobs.append(logprobs_of(token))

    def output(self, *, has_logprobs: bool) -> CompletionOutput:
        finish = self.finish
        stopped_by = finish.WhichOneof("stop_reason") if finish is not None else None
        return CompletionOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=list(self.token_ids),
            reasoning="".join(self._thoughts),
            tool_calls=list(self._calls.values()),
            logprobs=list(self._logprobs) if has_logprobs else None,
            cumulative_logprob=self._sum_logprob if has_logprobs else None,
            finish_reason=FINISH_REASONS.get(finish.reason) if finish is not None else None,
            stop_reason=getattr(finish, stopped_by) if stopped_by is not None else None,
        )


class AnswerSink:
    """A `Sink` of output streams whose ids are the indexes of their choices."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [GatheredChoice(i) for i in range(num_choices)]
        self.changed = asyncio.Event()
        """Set when output has come since it was cleared."""
        self.cached_tokens = 0
        self.vector: list[float] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        """One entry a token of the prompt from the second on."""
        self._row = self.choices[0]
        """Choice of the row that was added last."""

    @property
    def has_ended(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def failure(self) -> OutputFinish | None:
        """End of the first choice that ended without an answer."""
        ends = [choice.finish for choice in self.choices if choice.finish is not None]
        return next((end for end in ends if end.reason not in FINISH_REASONS), None)

    def add_row(
        self,
        stream_id: int,
        first: int,
        token_ids: Sequence[int],
        text: str,
        offset: int,
        num_bytes: int,
        /,
    ) -> None:
        self._row = self.choices[stream_id]
        self._row.add_row(token_ids, text)
        self.changed.set()

    def add_logprobs(self, tokens: Iterable[TokenLogprob], /) -> None:
        self._row.add_logprobs(tokens)

    def add_parts(self, parts: RowParts, /) -> None:
        self._row.add_parts(parts)

    def add_start(self, start: Start, /) -> None:
        self.cached_tokens = start.cached_tokens

    def add_embedding(self, embedding: Embedding, /) -> None:
        self.vector = list(embedding.values)

    def add_prompt_part(self, part: OutputPromptLogprobs, /) -> None:
        self.prompt_logprobs += [logprobs_of(token) for token in part.tokens]

    def add_finish(self, finish: OutputFinish, /) -> None:
        self.choices[finish.stream_id].finish = finish
        self.changed.set()


def logprobs_of(token: TokenLogprob) -> TokenLogprobs:
    return {
        each.token_id: Logprob(logprob=each.logprob, decoded_token=each.token)
        for each in (token.chosen, *token.top)
    }
