"""Calls of an answer, each delivered when it is complete: Ollama's API has no parts of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..request.sinks import CallPiece
from ..wire.call_arguments import arguments_as_object


class WholeCalls:
    """Collects the calls of the one choice. A call is complete when the next one begins."""

    def __init__(self) -> None:
        self._open: CallPiece | None = None

    def add(self, pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
        """Returns the calls that the pieces complete."""
        complete: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.name:
                complete += self.end()
                self._open = piece
            elif self._open is not None:
                self._open.arguments += piece.arguments
        return complete

    def end(self) -> list[dict[str, Any]]:
        """Returns the last call, which the end of the answer completes; nothing where there is
        none."""
        call = self._open
        self._open = None
        return [] if call is None else [_rendered(call)]


def _rendered(call: CallPiece) -> dict[str, Any]:
    arguments = arguments_as_object("".join(call.arguments))
    return {
        "id": call.id,
        "function": {"index": call.index, "name": call.name, "arguments": arguments},
    }
