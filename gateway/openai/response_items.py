"""Output items of a response (reasoning, messages and calls), and the events that report them as
they grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..request.sinks import CallPiece, Piece
from .logprobs import chat_logprobs

Event = dict[str, Any]
Item = dict[str, Any]
SUMMARY = "response.reasoning_summary"
CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Events that carry the arguments of a call, and the item's field for them."""


class ResponseItems:
    """Items of the one choice, which grow by pieces. Events have no sequence number yet; the stream
    adds it.

    A requested summary of the reasoning repeats the reasoning: there is no shorter one.
    """

    def __init__(
        self,
        request_id: str,
        own_names: Mapping[str, tuple[str, str]],
        *,
        wants_logprobs: bool,
        wants_summary: bool,
    ) -> None:
        """`own_names`: namespaces and names of tools of namespaces, by the names that calls
        have."""
        self._own_names = own_names
        self.items: list[Item] = []
        self._request_id = request_id
        self._wants_logprobs = wants_logprobs
        self._wants_summary = wants_summary
        self._texts: list[str] = []
        """Pieces of the open item's text or arguments."""
        self._logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        """Text of all messages."""
        parts = [
            part for item in self.items if item["type"] == "message" for part in item["content"]
        ]
        return "".join(part["text"] for part in parts)

    def add(self, piece: Piece) -> list[Event]:
        """Adds a piece. Reasoning comes before text and text before calls, as parsers find them."""
        events: list[Event] = []
        if reasoning := piece.reasoning:
            events += self._grow("reasoning", reasoning, [])
        if text := piece.text:
            scores = (
                chat_logprobs(piece.logprobs, as_ids=False)["content"]
                if self._wants_logprobs
                else []
            )
            events += self._grow("message", text, scores)
        for call in piece.calls:
            events += self._call(call)
        return events

    def end(self, status: str) -> list[Event]:
        """Closes the open item; an answer without output gets an empty message."""
        opened = [] if self.items else self._open(self._message())
        return opened + self._close(status)

    def break_off(self) -> list[Event]:
        """Closes the open item, if there is one, of an answer that ends with an error."""
        return self._close("incomplete")

    def _grow(self, kind: str, text: str, scores: list[dict[str, Any]]) -> list[Event]:
        events = []
        if not self._is_open(kind):
            events += self._close("completed")
            events += self._open(self._message() if kind == "message" else self._thoughts())
        self._texts.append(text)
        self._logprobs += scores
        where = self._where(content=True)
        if kind == "message":
            events.append(
                {"type": "response.output_text.delta", **where, "delta": text, "logprobs": scores}
            )
        else:
            events.append({"type": "response.reasoning_text.delta", **where, "delta": text})
            if self._wants_summary:
                events.append(
                    {"type": f"{SUMMARY}_text.delta", **self._where(summary=True), "delta": text}
                )
        return events

    def _call(self, call: CallPiece) -> list[Event]:
        events = []
        arguments = "".join(call.arguments)
        if call.name:
            events += self._close("completed")
            events += self._open(
                self._custom_call(call) if call.is_text else self._function_call(call)
            )
        self._texts.append(arguments)
        if arguments:
            event_name, _ = CALLS[self.items[-1]["type"]]
            events.append(
                {"type": f"response.{event_name}.delta", **self._where(), "delta": arguments}
            )
        return events

    def _is_open(self, kind: str) -> bool:
        return (
            bool(self.items)
            and self.items[-1]["type"] == kind
            and self.items[-1]["status"] == "in_progress"
        )

    def _open(self, item: Item) -> list[Event]:
        self.items.append(item)
        self._texts = []
        self._logprobs = []
        events: list[Event] = [
            {
                "type": "response.output_item.added",
                "output_index": len(self.items) - 1,
                "item": dict(item),
            }
        ]
        if item["type"] not in CALLS:
            events.append(
                {
                    "type": "response.content_part.added",
                    **self._where(content=True),
                    "part": self._part(""),
                }
            )
        if item["type"] == "reasoning" and self._wants_summary:
            part = {"type": "summary_text", "text": ""}
            events.append(
                {"type": f"{SUMMARY}_part.added", **self._where(summary=True), "part": part}
            )
        return events

    def _close(self, status: str) -> list[Event]:
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item = self.items[-1]
        text = "".join(self._texts)
        item["status"] = status
        if item["type"] in CALLS:
            event_name, key = CALLS[item["type"]]
            item[key] = text
            events = [
                {
                    "type": f"response.{event_name}.done",
                    **self._where(),
                    "name": item["name"],
                    key: text,
                }
            ]
        else:
            part = self._part(text)
            where = self._where(content=True)
            item["content"] = [part]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            scores = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            events = [
                {"type": f"response.{kind}.done", **where, "text": text, **scores},
                {"type": "response.content_part.done", **where, "part": part},
            ]
        if item["type"] == "reasoning" and self._wants_summary:
            events += self._sum_up(item, text)
        return [
            *events,
            {
                "type": "response.output_item.done",
                "output_index": len(self.items) - 1,
                "item": dict(item),
            },
        ]

    def _sum_up(self, item: Item, text: str) -> list[Event]:
        part = {"type": "summary_text", "text": text}
        where = self._where(summary=True)
        item["summary"] = [part]
        return [
            {"type": f"{SUMMARY}_text.done", **where, "text": text},
            {"type": f"{SUMMARY}_part.done", **where, "part": part},
        ]

    def _part(self, text: str) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs if text else [],
        }

    def _where(self, *, content: bool = False, summary: bool = False) -> dict[str, Any]:
        where: dict[str, Any] = {
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
        }
        return (
            where
            | ({"content_index": 0} if content else {})
            | ({"summary_index": 0} if summary else {})
        )

    def _message(self) -> Item:
        return self._new("message", "msg", role="assistant", content=[])

    def _thoughts(self) -> Item:
        return self._new("reasoning", "rs", summary=[], content=[])

    def _function_call(self, call: CallPiece) -> Item:
        named = self._named(call)
        return self._new("function_call", "fc", call_id=call.id, **named, arguments="")

    def _custom_call(self, call: CallPiece) -> Item:
        named = self._named(call)
        return self._new("custom_tool_call", "ctc", call_id=call.id, **named, input="")

    def _named(self, call: CallPiece) -> dict[str, str]:
        if call.name not in self._own_names:
            return {"name": call.name}
        namespace, name = self._own_names[call.name]
        return {"name": name, "namespace": namespace}

    def _new(self, kind: str, prefix: str, **fields: Any) -> Item:
        item_id = f"{prefix}_{self._request_id}{len(self.items):02d}"
        return {"type": kind, "id": item_id, "status": "in_progress", **fields}
