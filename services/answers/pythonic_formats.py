"""Table of the formats that write calls as Python between marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicFormat:
    """Texts with which one family writes calls."""

    signs: tuple[str, ...]
    """Texts of which each chat template of the family has one."""
    begin: str
    """Mark before the calls."""
    end: str
    """Mark behind the calls."""
    list_begin: str
    list_end: str
    between: str
    """Text between two calls."""

    @property
    def separators(self) -> str:
        """Characters that may be before a call."""
        return f"{self.list_begin}{self.between} \t\r\n"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format, any of which may be a token."""
        return (self.begin, self.end)


PYTHONIC_FORMATS: Mapping[str, PythonicFormat] = {
    "olmo3": PythonicFormat(
        signs=("<function_calls>",),
        begin="<function_calls>",
        end="</function_calls>",
        list_begin="\n",
        list_end="\n",
        between="\n",
    ),
    "gemma3": PythonicFormat(
        signs=("```tool_code",),
        begin="```tool_code",
        end="```",
        list_begin="\n",
        list_end="\n",
        between="\n",
    ),
    "lfm2": PythonicFormat(
        signs=("<|tool_list_start|>", "<|tool_call_start|>", "List of tools: ["),
        begin="<|tool_call_start|>",
        end="<|tool_call_end|>",
        list_begin="[",
        list_end="]",
        between=", ",
    ),
}
"""Formats, in the order in which their signs are looked for."""
