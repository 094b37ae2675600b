"""Table of the formats that write all calls of an answer as one list of JSON objects, behind a
mark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFormat:
    """Texts with which one family writes calls."""

    signs: tuple[str, ...]
    """Texts all of which occur in the chat templates of the family."""
    begin: str
    """Mark before the list."""
    end: str = ""
    """Mark behind the list."""
    list_begin: str = "["
    list_end: str = "]"
    between: str = ", "
    """Text between two calls."""
    id_key: str = ""
    """Key of the number that a call has before its name, as text; empty: it has none."""
    name_key: str = "name"
    """Key of the name; empty: the name is the key of the arguments."""
    arguments_key: str = "arguments"
    has_named_calls: bool = False
    """Whether a name and its arguments may also stand after the mark, without a list."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format, any of which may be a token."""
        own = (self.begin, self.end, *(("[ARGS]", "[CALL_ID]") if self.has_named_calls else ()))
        return tuple(filter(None, own))


LIST_FORMATS: Mapping[str, ListFormat] = {
    "mistral": ListFormat(signs=("[TOOL_CALLS]",), begin="[TOOL_CALLS]", has_named_calls=True),
    "nemotron": ListFormat(signs=("<TOOLCALL>",), begin="<TOOLCALL>", end="</TOOLCALL>"),
    "minimax_m1": ListFormat(
        signs=("<tool_calls>", "<end_of_sentence>"),
        begin="<tool_calls>",
        end="</tool_calls>",
        list_begin="\n",
        list_end="\n",
        between="\n",
    ),
    "apertus": ListFormat(
        signs=("<|tools_prefix|>",),
        begin="<|tools_prefix|>",
        end="<|tools_suffix|>",
        name_key="",
    ),
    "jamba": ListFormat(signs=("<tool_calls>",), begin="<tool_calls>", end="</tool_calls>"),
    "command": ListFormat(
        signs=("<|START_ACTION|>",),
        begin="<|START_ACTION|>",
        end="<|END_ACTION|>",
        id_key="tool_call_id",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    "phi4_mini": ListFormat(
        signs=("<|tool_call|>", "<|/tool_call|>"), begin="<|tool_call|>", end="<|/tool_call|>"
    ),
    "granite": ListFormat(signs=("<|tool_call|>",), begin="<|tool_call|>"),
}
"""Formats, in the order in which their signs are looked for."""
