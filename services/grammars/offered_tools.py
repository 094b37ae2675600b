"""Tools that a conversation offers, with the forms of their arguments that a grammar enforces."""

from __future__ import annotations

import json
from collections.abc import Iterator

from headwater.proto.common_pb2 import CustomInput, Tool
from headwater.proto.processor_pb2 import Conversation

from ..answers.format import ENFORCING, named_tool
from ..answers.forms import ANY_ARGUMENTS, NO_ARGUMENTS, Form, OfferedTool
from ..runtime.errors import BadRequest
from .ascii_escapes import ascii_grammar, ascii_regex
from .closed_schema import closed
from .json_schema import check_schema, parse_json
from .json_string_grammar import quoted_grammar, quoted_regex
from .lark import expression, refuse_endless_rule
from .prepared_schema import refuse_endless


def is_due_to_call(conversation: Conversation) -> bool:
    """Whether the answer has to call."""
    return named_tool(conversation) is not None or conversation.tool_choice == ENFORCING


def makes_one_call(conversation: Conversation) -> bool:
    return conversation.HasField("parallel_tool_calls") and not conversation.parallel_tool_calls


def all_offered(conversation: Conversation) -> list[OfferedTool]:
    """Offered tools, in the order of the client."""
    chosen = named_tool(conversation)
    is_due = is_due_to_call(conversation)
    allowed = conversation.allowed_tools or [tool.name for tool in conversation.tools]
    offered = [(i, tool) for i, tool in enumerate(conversation.tools) if tool.name in allowed]
    return [_offered(tool, i, is_due=is_due and chosen in (None, tool.name)) for i, tool in offered]


def is_held(tool: Tool) -> bool:
    """Whether calls are constrained beyond their form, also where the answer need not call."""
    return tool.strict or tool.custom_input.WhichOneof("format") is not None


def _offered(tool: Tool, i: int, *, is_due: bool) -> OfferedTool:
    """An offered tool. Where calls are optional and not strict, only their form is constrained."""
    if not (is_due or is_held(tool)):
        return OfferedTool(name=tool.name, parameters=ANY_ARGUMENTS)
    if tool.HasField("custom_input"):
        return OfferedTool(
            name=tool.name,
            parameters=ANY_ARGUMENTS,
            input=_text_input(tool.custom_input, i),
            text=_bare_text(tool.custom_input),
        )
    param = f"tools[{i}].function.parameters"
    # A function without parameters takes none.
    parameters = parse_json(param, tool.parameters_json) if tool.parameters_json else NO_ARGUMENTS
    check_schema(param, parameters)
    refuse_endless(param, parameters)
    if not isinstance(parameters.get("properties", {}), dict) or not isinstance(
        parameters.get("required", []), list
    ):
        raise BadRequest.of(param, parameters, "a JSON Schema of an object")
    # Arguments are an object whether or not the schema says so, or names other types besides, and
    # have no names but those that the function gives.
    return OfferedTool(name=tool.name, parameters=closed(parameters) | {"type": "object"})


def _text_input(asked: CustomInput, i: int) -> Form:
    """JSON string of a custom tool's text, as models write it."""
    param = format_param(i)
    text: Form
    match asked.WhichOneof("format"):
        case "lark":
            refuse_endless_rule(param, asked.lark)
            text = {
                "type": "grammar",
                "grammar": quoted_grammar(param, ascii_grammar(asked.lark, {})),
            }
        case "regex":
            text = {"type": "regex", "pattern": quoted_regex(param, ascii_regex(asked.regex))}
        case _:
            return {"type": "json_schema", "json_schema": {"type": "string"}}
    quote = {"type": "const_string", "value": '"'}
    return {"type": "sequence", "elements": [quote, text, quote]}


def _bare_text(asked: CustomInput) -> Form | None:
    """A custom tool's text without quotes; None: it is any text."""
    match asked.WhichOneof("format"):
        case "lark":
            return {"type": "grammar", "grammar": ascii_grammar(asked.lark, {})}
        case "regex":
            return {"type": "regex", "pattern": ascii_regex(asked.regex)}
    return None


def custom_grammars(conversation: Conversation) -> Iterator[tuple[int, str]]:
    """Grammars of the texts of custom tools, each alone, by the tool's position."""
    for i, tool in enumerate(conversation.tools):
        match tool.custom_input.WhichOneof("format"):
            case "lark":
                yield (
                    i,
                    json.dumps(
                        {"grammars": [{"lark_grammar": ascii_grammar(tool.custom_input.lark, {})}]}
                    ),
                )
            case "regex":
                pattern = expression(format_param(i), tool.custom_input.regex)
                yield i, json.dumps({"grammars": [{"lark_grammar": f"start: {pattern}"}]})


def format_param(i: int) -> str:
    """Client's name of the field with the format of a tool's text."""
    return f"tools[{i}].custom.format.grammar.definition"
