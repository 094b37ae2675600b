"""Renders an answer as a message of Anthropic's API: whole, or as a stream of events in their
order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..request.choice import Choice
from ..request.generation import Generation
from ..request.sinks import Piece
from ..wire.body_stream import BodyStream
from ..wire.event_sink import EventSink
from ..wire.sse import typed_event
from .content_blocks import ContentBlocks, Event


@dataclass(slots=True, kw_only=True)
class MessageAnswer:
    """One message: its generation, and its content so far."""

    request_id: str
    model: str
    generation: Generation
    content: ContentBlocks = field(default_factory=ContentBlocks)

    def begun(self) -> dict[str, Any]:
        """The message without content, with the usage known so far."""
        return self._message([], {"stop_reason": None, "stop_sequence": None})

    def whole(self, piece: Piece) -> dict[str, Any]:
        """The message of an answer that has ended, all of which is in the piece."""
        self.content.add(piece)
        self.content.close()
        return self._message(self.content.blocks, self.stop())

    def stop(self) -> dict[str, Any]:
        """Why the answer ended."""
        [choice] = self.generation.choices
        reason = _stop_reason(choice, has_calls=self.content.has_calls)
        sequence = choice.stop_reason if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence}

    def usage(self) -> dict[str, Any]:
        """Token counts of a request. Prompt tokens are divided into cached and uncached ones."""
        generation = self.generation
        cached = generation.cached_tokens
        return {
            "input_tokens": generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": generation.num_reasoning_tokens},
        }

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": self.usage(),
        }


class MessageEvents(EventSink):
    """A sink that writes a message's events."""

    silence = typed_event({"type": "ping"})

    def __init__(
        self, answer: MessageAnswer, open_stream: Callable[[Callable[[], None]], BodyStream]
    ) -> None:
        super().__init__(open_stream)
        self._answer = answer
        self._has_begun = False

    def last_events(self) -> bytes:
        """Why the answer ended, its usage, and the end."""
        answer = self._answer
        delta = {"type": "message_delta", "delta": answer.stop(), "usage": answer.usage()}
        return _written([delta, {"type": "message_stop"}])

    def _opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return typed_event({"type": "message_start", "message": self._answer.begun()})

    def _events_of(self, piece: Piece) -> bytes:
        return _written(self._answer.content.add(piece))

    def _ending(self, choice: Choice) -> bytes:
        return _written(self._answer.content.close())


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(map(typed_event, events))


def _stop_reason(choice: Choice, *, has_calls: bool) -> str:
    """Reason in Anthropic's words."""
    match choice.finish_reason:
        case "length":
            return "max_tokens"
        case "content_filter":
            return "refusal"
        case "tool_calls":
            return "tool_use"
    if isinstance(choice.stop_reason, str):
        return "stop_sequence"
    # A call of the function that the client chose ends an answer like its last token.
    return "tool_use" if has_calls else "end_turn"
