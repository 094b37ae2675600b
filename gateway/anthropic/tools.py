"""Tools of a request to the Messages API, and which of them may or must be called."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headwater.proto import common_pb2
from headwater.proto.processor_pb2 import Conversation
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.request_limits import bounded_tools

from ..wire.noted import note
from ..wire.required import given
from .schema import TOOL_NAME, Tool, ToolChoice

HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
"""Beginnings of the types of tools that Anthropic runs. They are passed over."""
WORDS = {"auto": "auto", "any": "required", "none": "none"}
"""The contract's words for types of a tool choice."""


class MessageTools:
    """The tools that the answer may call."""

    def __init__(self, tools: Sequence[Tool] | None) -> None:
        """Raises `BadRequest`."""
        self._offered: list[common_pb2.Tool] = []
        self._places: list[str] = []
        for i, tool in enumerate(tools or ()):
            kind = tool.type or "custom"
            if kind.startswith(HOSTED):
                note("hosted tool passed over", kind[:80], type=kind[:80])
            else:
                self._add(tool, kind, f"tools[{i}]")

    def _add(self, tool: Tool, kind: str, at: str) -> None:
        BadRequest.unless(kind == "custom", f"{at}.type", kind, "custom, with an input_schema")
        schema = given(f"{at}.input_schema", tool.input_schema, "a JSON Schema of an object")
        self._offered.append(
            common_pb2.Tool(
                name=given(f"{at}.name", tool.name, TOOL_NAME),
                description=tool.description or "",
                parameters_json=msgspec.json.encode(schema).decode(),
                strict=tool.strict,
            )
        )
        self._places.append(at)

    def to_pb(self, choice: ToolChoice | None) -> Conversation:
        """The tools and the choice in the contract's form. Raises `BadRequest`."""
        conversation = Conversation(tools=bounded_tools(self._offered))
        if choice is None:
            return conversation
        if not self._offered:
            # Clients send `auto` whether or not they have tools.
            allowed = "auto or none, without tools that are served"
            BadRequest.unless(
                choice.type in ("auto", "none"), "tool_choice.type", choice.type, allowed
            )
            return conversation
        if choice.disable_parallel_tool_use is not None:
            conversation.parallel_tool_calls = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            name = given("tool_choice.name", choice.name, "the name of a tool")
            conversation.tool_choice = name
            conversation.tool_choice_is_name = True
        else:
            conversation.tool_choice = WORDS[choice.type]
        return conversation

    def renamed(self) -> dict[str, str]:
        """Client's names of fields, by the contract's names."""
        names = {"tool_choice": "tool_choice.name"}
        for i, at in enumerate(self._places):
            names[f"tools[{i}].function.name"] = f"{at}.name"
            names[f"tools[{i}].function.parameters"] = f"{at}.input_schema"
        return names
