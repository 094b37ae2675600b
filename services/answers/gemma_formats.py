"""Table of the formats that write calls as Gemma does: names without quotes, and strings between
marks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CALL = "call:"
"""Text before the name of a function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaFormat:
    """Marks of one family. The chat templates of the family contain `begin`."""

    begin: str
    """Mark before a call."""
    end: str
    """Mark behind a call."""
    quote: str
    """Mark before a string, and behind it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format, any of which may be a token."""
        return (self.begin, self.end, self.quote)


GEMMA_FORMATS: Mapping[str, GemmaFormat] = {
    "gemma4": GemmaFormat(begin="<|tool_call>", end="<tool_call|>", quote='<|"|>'),
    "functiongemma": GemmaFormat(
        begin="<start_function_call>", end="<end_function_call>", quote="<escape>"
    ),
}
"""Formats, in the order in which their marks are looked for."""
