"""One format in which a family of models writes calls, as grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .forms import Form, OfferedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format in which one family writes calls."""

    signs: tuple[tuple[str, ...], ...]
    """Sets of texts that identify a format: a chat template belongs to it if it contains all texts
    of one set."""
    calls: Callable[[Sequence[OfferedTool], bool], Form]
    """Grammar of an answer that consists of calls; of exactly one call if the second argument is
    true."""
    free: Callable[[Sequence[OfferedTool], bool], Form]
    """Grammar of an answer that may call, and whose calls match their schemas."""
    opening: str = ""
    """Text with which calls begin anywhere in an answer; empty where they begin otherwise."""
    frame: str = ""
    """Text before content, where answers without calls have one."""
    calls_beside_json: Callable[[Sequence[OfferedTool], bool], Form] | None = None
    """`calls` for an answer that may be other JSON instead, where a call is JSON from its first
    character; None: `calls` does."""

    def instead(self, tools: Sequence[OfferedTool], single: bool) -> Form:
        """Grammar of an answer of nothing but calls, as an alternative to another constraint, JSON
        for example."""
        return (self.calls_beside_json or self.calls)(tools, single)
