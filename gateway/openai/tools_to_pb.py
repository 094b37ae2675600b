"""OpenAI's tools and tool choices to the stages' messages."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest

from ..wire.required import given
from .response_schema import ToolFields
from .schema import (
    ChatCompletionRequest,
    CustomFormat,
    CustomTool,
    Function,
    NamedTool,
    TextGrammar,
    Tool,
    ToolChoice,
    ToolName,
)

TOOL_CHOICES = ("auto", "none", "required")
NAMED = "an object with a name"


def tool_choice_to_pb(asked: ChatCompletionRequest) -> processor_pb2.Conversation:
    """Tool choice by a tool's name, or by a word with the tools that it allows where these are not
    all."""
    choice = asked.tool_choice
    if not isinstance(choice, ToolChoice):
        return processor_pb2.Conversation(tool_choice=tool_choice_word(choice))
    kinds = {_name_of(tool, ""): tool.type for tool in asked.tools or ()}
    if choice.type != "allowed_tools":
        name = offered_as(choice.type, _name_of(choice, "tool_choice"), "tool_choice", kinds)
        return processor_pb2.Conversation(tool_choice=name, tool_choice_is_name=True)
    allowed = given(
        "tool_choice.allowed_tools", choice.allowed_tools, "an object with mode and tools"
    )
    tools = [
        (f"tool_choice.allowed_tools.tools[{i}]", tool) for i, tool in enumerate(allowed.tools)
    ]
    names = [offered_as(tool.type, _name_of(tool, at), at, kinds) for at, tool in tools]
    return processor_pb2.Conversation(tool_choice=allowed.mode, allowed_tools=names)


def offered_as(kind: str, name: str, at: str, kinds: Mapping[str, str]) -> str:
    """Name of an offered tool in the contract; an unknown name is left for the contract to refuse.
    `kinds`: types of the offered tools, by name."""
    if kinds.get(name, kind) != kind:
        raise BadRequest.of(f"{at}.type", kind, f"{kinds[name]}, which {name!r} is")
    return name


def _name_of(tool: Tool | NamedTool | ToolChoice, at: str) -> str:
    named: CustomTool | Function | ToolName | None = (
        tool.custom if tool.type == "custom" else tool.function
    )
    return given(f"{at}.{tool.type}", None if named is None else named.name, NAMED)


def tool_choice_word(choice: str | None) -> str | None:
    """Maps a tool choice to the contract's word. The contract takes words and names of tools, so an
    unknown word is refused."""
    if choice is not None and choice not in TOOL_CHOICES:
        raise BadRequest.of(
            "tool_choice", choice, "auto, none, required, or an object that names functions"
        )
    return choice


def tool_to_pb(tool: Tool, at: str) -> common_pb2.Tool:
    if tool.type == "function":
        function = given(f"{at}.function", tool.function, NAMED)
        return function_to_pb(function, function.name, function.description)
    custom = given(f"{at}.custom", tool.custom, NAMED)
    return common_pb2.Tool(
        name=custom.name,
        description=custom.description or "",
        custom_input=text_to_pb(_grammar_of(custom.format, f"{at}.custom.format")),
    )


def function_to_pb(
    function: Function | ToolFields, name: str, description: str | None
) -> common_pb2.Tool:
    return common_pb2.Tool(
        name=name,
        description=description or "",
        parameters_json=""
        if function.parameters is None
        else msgspec.json.encode(function.parameters).decode(),
        strict=function.strict,
    )


def _grammar_of(form: CustomFormat | None, at: str) -> TextGrammar | None:
    if form is None or form.type == "text":
        return None
    return given(f"{at}.grammar", form.grammar, "an object with definition and syntax")


def text_to_pb(grammar: TextGrammar | None) -> common_pb2.CustomInput:
    """Text that a custom tool takes; without a grammar any text."""
    return common_pb2.CustomInput(
        **({} if grammar is None else {grammar.syntax: grammar.definition})
    )
