"""Table of the formats that write each call as one JSON object, behind a mark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFormat:
    """Texts with which one family writes calls.

    White space in the texts is how the models write it; readers take any.
    """

    signs: tuple[str, ...]
    """Texts all of which occur in the chat templates of the family."""
    begin: str
    """Text before the object."""
    other_begin: str = ""
    """Another mark before the object, which readers accept."""
    end: str = ""
    """Text behind the object."""
    stop: str = ""
    """Mark with which an answer ends, and `begin` begins: alone it is no content."""
    between: str = "\n"
    """Text between two calls."""
    arguments_key: str = "arguments"

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks before an object."""
        return tuple(filter(None, (self.begin.strip(), self.other_begin.strip())))

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format, any of which may be a token, or several."""
        return tuple(filter(None, (*self.begins, self.end.strip())))


OBJECT_FORMATS: Mapping[str, ObjectFormat] = {
    "longcat": ObjectFormat(
        signs=("<longcat_tool_call>",),
        begin="<longcat_tool_call>\n",
        end="\n</longcat_tool_call>",
    ),
    "internlm": ObjectFormat(
        signs=("<|action_start|>", "<|plugin|>"),
        begin="<|action_start|><|plugin|>\n",
        end="<|action_end|>",
        between="",
        arguments_key="parameters",
    ),
    "gigachat3": ObjectFormat(
        signs=("function call", "<|role_sep|>"),
        begin="<|message_sep|>\n\nfunction call<|role_sep|>\n",
        other_begin="<|function_call|>",
        stop="<|message_sep|>",
        between="",
    ),
    "granite_20b_fc": ObjectFormat(
        signs=("<function_call> ",), begin="<function_call> ", between=" "
    ),
    "hermes": ObjectFormat(signs=("<tool_call>",), begin="<tool_call>\n", end="\n</tool_call>"),
}
"""Formats, in the order in which their signs are looked for."""
