"""Renders an answer as Ollama's API does: whole, or as a stream of JSON lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from headwater.proto.common_pb2 import TokenLogprob

from ..request.choice import Choice
from ..request.generation import Generation
from ..request.sinks import Piece
from ..wire.body_stream import BodyStream
from ..wire.event_sink import EventSink
from ..wire.token_scores import token_scores
from .lines import line, nanoseconds, written_time
from .schema import Answering, ChatRequest
from .whole_calls import WholeCalls

Calls = Sequence[dict[str, Any]]


class OllamaAnswer:
    """One answer of chat, whose text is in a message, or of generate."""

    def __init__(self, asked: Answering, generation: Generation) -> None:
        self._model = asked.model
        self._is_chat = isinstance(asked, ChatRequest)
        self._has_scores = bool(asked.logprobs)
        self._generation = generation
        self.calls = WholeCalls()

    def part(self, piece: Piece | None, calls: Calls = ()) -> dict[str, Any]:
        """A part of the answer; `calls` are complete."""
        content = (
            self._content("")
            if piece is None
            else self._content(piece.text, piece.reasoning, calls)
        )
        scores = self._scores(piece.logprobs) if piece is not None else {}
        return {**self._head(), **content, "done": False, **scores}

    def end(self) -> dict[str, Any]:
        """The last part: why the answer ended, and its figures."""
        return {**self._head(), **self._content(""), **self._ended()}

    def whole(self, piece: Piece) -> dict[str, Any]:
        """An answer that has ended, all of which is in the piece."""
        calls = [*self.calls.add(piece.calls), *self.calls.end()]
        content = self._content(piece.text, piece.reasoning, calls)
        return {**self._head(), **content, **self._ended(), **self._scores(piece.logprobs)}

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": written_time(time.time())}

    def _content(self, text: str, thoughts: str = "", calls: Calls = ()) -> dict[str, Any]:
        thinking = {"thinking": thoughts} if thoughts else {}
        if not self._is_chat:
            return {"response": text, **thinking}
        tool_calls = {"tool_calls": list(calls)} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **tool_calls}}

    def _scores(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": token_scores(tokens, as_ids=False)} if self._has_scores else {}

    def _ended(self) -> dict[str, Any]:
        generation = self._generation
        [choice] = generation.choices
        seconds = generation.timeline.stretches()
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(seconds["total"]),
            "load_duration": nanoseconds(seconds["replica"]),
            "prompt_eval_count": generation.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(seconds["engine_prefill"]),
            "eval_count": generation.num_output_tokens,
            "eval_duration": nanoseconds(seconds["after_first_token"]),
        }


class OllamaLines(EventSink):
    """A sink that writes an answer's lines."""

    def __init__(
        self, answer: OllamaAnswer, open_stream: Callable[[Callable[[], None]], BodyStream]
    ) -> None:
        super().__init__(open_stream)
        self._answer = answer
        # A part without text: there are no comments in JSON lines.
        self.silence = line(answer.part(None))

    def last_events(self) -> bytes:
        return line(self._answer.end())

    def _opening(self) -> bytes:
        return b""

    def _events_of(self, piece: Piece) -> bytes:
        calls = self._answer.calls.add(piece.calls)
        if not (piece.text or piece.reasoning or calls or piece.logprobs):
            return b""
        return line(self._answer.part(piece, calls))

    def _ending(self, choice: Choice) -> bytes:
        calls = self._answer.calls.end()
        return line(self._answer.part(Piece(choice), calls)) if calls else b""


def loaded(asked: Answering) -> dict[str, Any]:
    """The answer to a request that only loads the model."""
    content: dict[str, Any] = {"response": ""}
    if isinstance(asked, ChatRequest):
        content = {"message": {"role": "assistant", "content": ""}}
    head = {"model": asked.model, "created_at": written_time(time.time())}
    return {**head, **content, "done": True, "done_reason": "load"}
