"""Renders a response as JSON: whole, or as a stream of OpenAI's events in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headwater.services.runtime import errors

from ..request.choice import Choice
from ..request.generation import Generation
from ..request.sinks import Piece
from ..wire.body_stream import BodyStream
from ..wire.event_sink import EventSink
from ..wire.sse import KEEP_ALIVE, typed_event
from .errors import response_error
from .numbered import NumberedStream
from .response_input import LOGPROBS
from .response_items import Event, ResponseItems
from .response_schema import ResponsesRequest, ResponseTool, TextOptions
from .response_tools import ResponseTools


@dataclass(slots=True, kw_only=True)
class ResponseAnswer:
    """One response: the request, and the answer so far."""

    request_id: str
    asked: ResponsesRequest
    created: int = field(default_factory=lambda: int(time.time()))
    conversation_id: str | None = None
    generation: Generation | None = None
    """Set before it runs; None for a response that is only asked for."""
    items: ResponseItems = field(init=False)
    _tools: ResponseTools = field(init=False)

    def __post_init__(self) -> None:
        self.conversation_id = self.asked.conversation_id
        wants_logprobs = (
            LOGPROBS in (self.asked.include or ()) or self.asked.top_logprobs is not None
        )
        wants_summary = (
            self.asked.reasoning is not None and self.asked.reasoning.summary is not None
        )
        self._tools = ResponseTools(self.asked.tools)
        self.items = ResponseItems(
            self.request_id,
            self._tools.own_names(),
            wants_logprobs=wants_logprobs,
            wants_summary=wants_summary,
        )

    @property
    def id(self) -> str:
        return f"resp_{self.request_id}"

    @property
    def is_stored(self) -> bool:
        """Whether the response is to be kept: as the client asked, from the first event of a stream
        on."""
        return self.asked.store is not False

    def response(
        self, status: str, generation: Generation | None = None, **more: Any
    ) -> dict[str, Any]:
        """The object as it is now; sampling as the contract completed it, once it has.

        It has output only when it has ended: events announce each item, and clients refuse one that
        is there before.
        """
        asked = self.asked
        sampling = generation.prepared.sampling if generation is not None else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": bool(asked.background),
            "conversation": {"id": self.conversation_id}
            if self.conversation_id is not None
            else None,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            # `max_tokens` is vLLM's name for it.
            "max_output_tokens": asked.max_output_tokens or asked.max_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": asked.reasoning or {"effort": None, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": sampling.temperature if sampling is not None else asked.temperature,
            "text": {"format": {"type": "text"}} | _given(asked.text or TextOptions()),
            "tool_choice": _given(asked.tool_choice or "auto"),
            "tools": [_shown(tool) for tool in self._tools.served],
            "top_logprobs": asked.top_logprobs,
            "top_p": sampling.top_p if sampling is not None else asked.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": None,
            "user": asked.user,
            **more,
        }

    def ended(self) -> dict[str, Any]:
        """The object of an answer that has ended."""
        generation = self.generation
        assert generation is not None
        is_cut = generation.choices[0].finish_reason == "length"
        more: dict[str, Any] = {"output": self.items.items, "usage": _usage(generation)}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["completed_at"] = generation.choices[0].ended_at or int(time.time())
        return self.response("incomplete" if is_cut else "completed", generation, **more)

    def failed(self, error: errors.HeadwaterError) -> dict[str, Any]:
        """The object of an answer that ends with an error, with its output so far; it is kept if it
        was computed in the background."""
        more: dict[str, Any] = {
            "error": {"code": error.code, "message": error.message},
            "output": self.items.items,
        }
        begun = (
            self.generation if self.generation is not None and self.generation.has_begun else None
        )
        if begun is not None:
            more["usage"] = _usage(begun)
        return self.response("failed", begun, store=bool(self.asked.background), **more)


class ResponseEvents(EventSink):
    """A sink that writes a response's events."""

    silence = KEEP_ALIVE

    def __init__(
        self,
        answer: ResponseAnswer,
        open_stream: Callable[[Callable[[], None]], BodyStream | NumberedStream],
    ) -> None:
        super().__init__(open_stream)
        self._answer = answer
        self._num_events = 0

    def last_event(self, response: dict[str, Any]) -> bytes:
        event = self._event({"type": f"response.{response['status']}", "response": response})
        return self.out.numbered(event) if isinstance(self.out, NumberedStream) else event

    def failure(self, error: errors.HeadwaterError) -> bytes:
        """Events of a stream that breaks: the error, what was held and the end of the open item,
        the failed response.

        NOTE: the error comes first, for a reader in the background stops there when another one has
        the stream.
        """
        first = self._event(response_error(error))
        rest = self._held_events() + self._events(self._answer.items.break_off())
        failed = {"type": "response.failed", "response": self._answer.failed(error)}
        return first + rest + self._event(failed)

    def _opening(self) -> bytes:
        if self._num_events:
            return b""
        kinds = ("created", "in_progress")
        return self._events(
            {"type": f"response.{kind}", "response": self._answer.response("in_progress")}
            for kind in kinds
        )

    def _events_of(self, piece: Piece) -> bytes:
        return self._events(self._answer.items.add(piece))

    def _ending(self, choice: Choice) -> bytes:
        return self._events(self._answer.items.end(last_status(choice)))

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: Event) -> bytes:
        numbered = {"sequence_number": self._num_events, **event}
        self._num_events += 1
        return typed_event(numbered)


def last_status(choice: Choice) -> str:
    """Status of the last item of an answer that has ended. An item is cut by the answer's length,
    and a call also by a stop string."""
    is_cut = choice.finish_reason == "length" or choice.has_cut_call
    return "incomplete" if is_cut else "completed"


def _usage(generation: Generation) -> dict[str, Any]:
    prompt = generation.num_prompt_tokens
    output = generation.num_output_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": generation.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
        "total_tokens": prompt + output,
    }


def _given(value: Any) -> Any:
    """A part of the request without the fields that it left out. Schemas are plain data and stay as
    they are."""
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return {name: _given(field) for name, field in fields if field is not None}
    return [_given(each) for each in value] if isinstance(value, list) else value


def _shown(tool: ResponseTool) -> dict[str, Any]:
    """A tool as the answer repeats it: functions always have `parameters` and `strict`."""
    always = {"parameters": None, "strict": None} if tool.type == "function" else {}
    given: dict[str, Any] = always | _given(tool)
    return given
