"""Content blocks of a message (thinking, text and calls), and the events that report them as they
grow."""

from __future__ import annotations

from base64 import b64encode
from hashlib import blake2b
from typing import Any

from ..request.sinks import CallPiece, Piece
from ..wire.call_arguments import arguments_as_object

Event = dict[str, Any]
Block = dict[str, Any]


class ContentBlocks:
    """Blocks of the one choice, which grow by pieces."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._texts: list[str] = []
        """Pieces of the open block's text or arguments."""
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, piece: Piece) -> list[Event]:
        """Adds a piece. Thoughts come before text and text before calls, as parsers find them."""
        events: list[Event] = []
        if thoughts := piece.reasoning:
            events += self._grow("thinking", thoughts)
        if text := piece.text:
            events += self._grow("text", text)
        for call in piece.calls:
            events += self._call(call)
        return events

    def close(self) -> list[Event]:
        """Closes the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        block = self.blocks[-1]
        text = "".join(self._texts)
        events: list[Event] = []
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                signature = _signature(text)
                block |= {"thinking": text, "signature": signature}
                events.append(self._delta("signature_delta", "signature", signature))
            case "tool_use":
                block["input"] = arguments_as_object(text)
        events.append({"type": "content_block_stop", "index": len(self.blocks) - 1})
        return events

    def _grow(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not (self._is_open and self.blocks[-1]["type"] == kind):
            empty = {kind: "", "signature": ""} if kind == "thinking" else {kind: ""}
            events += self._open({"type": kind, **empty})
        self._texts.append(text)
        events.append(self._delta(f"{kind}_delta", kind, text))
        return events

    def _call(self, call: CallPiece) -> list[Event]:
        events: list[Event] = []
        arguments = "".join(call.arguments)
        if call.name:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events += self._open(block)
        self._texts.append(arguments)
        if arguments:
            events.append(self._delta("input_json_delta", "partial_json", arguments))
        return events

    def _open(self, block: Block) -> list[Event]:
        events = self.close()
        self.blocks.append(block)
        self._texts = []
        self._is_open = True
        start = {"index": len(self.blocks) - 1, "content_block": dict(block)}
        return [*events, {"type": "content_block_start", **start}]

    def _delta(self, kind: str, name: str, text: str) -> Event:
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _signature(thoughts: str) -> str:
    """Mark of a block of thoughts. Clients drop a block without one; nothing reads it."""
    return b64encode(blake2b(thoughts.encode(), digest_size=24).digest()).decode()
