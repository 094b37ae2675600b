"""Converts a conversation as clients send it to the messages and tools that chat templates read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.proto import common_pb2, processor_pb2

from ..answers.format import may_call
from ..answers.text_input import KEY
from ..runtime.client_json import read_json
from ..runtime.errors import BadRequest
from ..runtime.json_limits import MAX_FIELD_VALUES
from ..runtime.message_roles import check_role
from ..runtime.request_limits import check_conversation
from ..text.chat_template import ChatTemplate
from . import plain_tools

Message = dict[str, Any]
Guard = Callable[[str], str]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
NO_OBJECT = "arguments"
"""Name under which templates get the text of arguments that are no JSON object."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def render(
    template: ChatTemplate, conversation: processor_pb2.Conversation, guard: Guard | None = None
) -> str:
    """Text of the prompt; `guard` is applied to all text of the client. Raises `BadRequest` naming
    the message and what is allowed."""
    BadRequest.unless(conversation.messages, "messages", [], "at least one message")
    check_conversation(conversation)
    goes_on = conversation.continue_final_message
    if (
        goes_on
        and conversation.HasField("add_generation_prompt")
        and conversation.add_generation_prompt
    ):
        raise BadRequest(
            "continue_final_message", "continue_final_message excludes add_generation_prompt"
        )
    _check_tool_choice(conversation)
    _check_tool_names(conversation)
    messages = [_message(message, i) for i, message in enumerate(conversation.messages)]
    tools = (
        [_tool(tool, i) for i, tool in enumerate(conversation.tools)]
        if may_call(conversation)
        else None
    )
    variables = _variables(conversation.chat_template_kwargs_json, template)
    if guard is not None:
        messages, tools, variables = (
            _guarded(each, guard) for each in (messages, tools, variables)
        )
    return template.render(
        _understood(template, messages, tools),
        tools=tools,
        add_generation_prompt=not conversation.HasField("add_generation_prompt")
        or conversation.add_generation_prompt,
        continue_final_message=goes_on,
        variables=_effort(conversation) | _verbosity(conversation) | variables,
    )


def _guarded(value: Any, guard: Guard) -> Any:
    """JSON with all its texts, names included, guarded."""
    match value:
        case str():
            return guard(value)
        case list():
            return [_guarded(each, guard) for each in value]
        case dict():
            return {guard(name): _guarded(each, guard) for name, each in value.items()}
        case _:
            return value


def _understood(
    template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]] | None
) -> list[Message]:
    """The messages in roles that the template has: not every template knows developers, tools and
    calls."""
    if not template.mentions("developer"):
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    if template.mentions("message.thinking") and not template.mentions("reasoning_content"):
        messages = [_with_thinking(message) for message in messages]
    if template.reads_tools or template.mentions("tool_calls"):
        return messages
    messages = plain_tools.written(messages)
    return plain_tools.offered(messages, tools) if tools else messages


def _with_thinking(message: Message) -> Message:
    """The message with its thoughts under gpt-oss's name. Beside calls, its template takes thoughts
    or content, and raises for both."""
    thoughts = message.get("reasoning_content")
    if not thoughts or (message.get("tool_calls") and message["content"]):
        return message
    return message | {"thinking": thoughts}


def _effort(conversation: processor_pb2.Conversation) -> dict[str, Any]:
    """Reasoning effort, for templates that take one."""
    effort = conversation.reasoning_effort
    BadRequest.unless(
        not effort or effort in EFFORTS, "reasoning_effort", effort, ", ".join(EFFORTS)
    )
    if not effort:
        return {}
    return {
        "reasoning_effort": effort,
        "enable_thinking": effort != "none",
        "thinking": effort != "none",
    }


def _verbosity(conversation: processor_pb2.Conversation) -> dict[str, Any]:
    """Verbosity, for templates that take one."""
    verbosity = conversation.verbosity
    BadRequest.unless(
        not verbosity or verbosity in VERBOSITIES, "verbosity", verbosity, ", ".join(VERBOSITIES)
    )
    return {"verbosity": verbosity} if verbosity else {}


def _check_tool_names(conversation: processor_pb2.Conversation) -> None:
    names: set[str] = set()
    for i, tool in enumerate(conversation.tools):
        param = f"tools[{i}].{'custom' if tool.HasField('custom_input') else 'function'}.name"
        BadRequest.unless(
            _TOOL_NAME.fullmatch(tool.name), param, tool.name, "1 to 64 letters, digits, _, - and ."
        )
        BadRequest.unless(tool.name not in names, param, tool.name, "names that differ")
        names.add(tool.name)


def _check_tool_choice(conversation: processor_pb2.Conversation) -> None:
    choice = conversation.tool_choice
    names = [tool.name for tool in conversation.tools]
    known = set(names)
    for name in conversation.allowed_tools:
        if name not in known:
            raise BadRequest.of("tool_choice", name, f"allowed tools of {names}")
    is_name = conversation.tool_choice_is_name
    if not is_name and choice in ("", "none"):
        return
    if not names:
        raise BadRequest("tool_choice", f"tool_choice is {choice!r} without tools; allowed: none")
    callable_names = list(conversation.allowed_tools) or names
    if choice not in callable_names and (is_name or choice not in ("auto", "required")):
        words = "" if is_name else "none, auto, required or "
        raise BadRequest.of("tool_choice", choice, f"{words}one of {callable_names}")


def _message(message: common_pb2.ChatMessage, i: int) -> dict[str, Any]:
    check_role(message.role, f"messages[{i}]")
    rendered: dict[str, Any] = {"role": message.role, "content": _content(message, i)}
    if message.tool_calls:
        rendered["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.HasField(name):
            rendered[name] = getattr(message, name)
    return rendered


def _content(message: common_pb2.ChatMessage, i: int) -> str:
    if message.HasField("content"):
        return message.content
    for k, part in enumerate(message.parts):
        BadRequest.unless(
            part.type == "text", f"messages[{i}].content[{k}].type", part.type, "text"
        )
    if not message.parts and message.role != "assistant":
        param = f"messages[{i}].content"
        raise BadRequest(
            param, f"{param} is missing or has no parts; allowed: a string or a list of text parts"
        )
    return "\n".join(part.text for part in message.parts)


def _tool_call(call: common_pb2.ToolCall) -> dict[str, Any]:
    """A tool call for templates, which write the arguments as an object; clients send them as
    JSON."""
    arguments = {KEY: call.input} if call.HasField("input") else _written_arguments(call.arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _written_arguments(text: str) -> dict[str, Any]:
    """Arguments of an earlier call. A model may have written anything, or was cut while it wrote:
    what is no object, or exceeds the limits of JSON, stands as text in one."""
    try:
        arguments = read_json(text or "{}", max_values=MAX_FIELD_VALUES)
    except (BadRequest, msgspec.MsgspecError, UnicodeError):
        arguments = text
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {NO_OBJECT: text}


def _tool(tool: common_pb2.Tool, i: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.HasField("custom_input"):
        return {
            "type": "function",
            "function": function | {"parameters": _text_parameters(tool.custom_input)},
        }
    param = f"tools[{i}].function.parameters"
    function["parameters"] = parameters = _json_object(tool.parameters_json or "{}", param)
    BadRequest.unless(_allows_objects(parameters), param, parameters, "a JSON Schema of an object")
    return {"type": "function", "function": function}


def _allows_objects(schema: dict[str, Any]) -> bool:
    """Whether a schema's own keywords let objects match; subschemas that it references are not
    read."""
    types = schema.get("type", "object")
    values = [schema["const"]] if "const" in schema else schema.get("enum", [{}])
    has_object = not isinstance(values, list) or any(isinstance(value, dict) for value in values)
    return has_object and "object" in (types if isinstance(types, list) else [types])


def _text_parameters(asked: common_pb2.CustomInput) -> dict[str, Any]:
    """Parameters of a custom tool, which models see as a function whose one argument is a
    string."""
    text = {"type": "string"}
    match asked.WhichOneof("format"):
        case "lark":
            text["description"] = f"Text that matches this Lark grammar:\n{asked.lark}"
        case "regex":
            text["description"] = f"Text that matches this regular expression: {asked.regex}"
    return {"type": "object", "properties": {KEY: text}, "required": [KEY]}


def _variables(kwargs_json: str, template: ChatTemplate) -> dict[str, Any]:
    variables = _json_object(kwargs_json or "{}", "chat_template_kwargs")
    for name in _RESERVED:
        if name in variables:
            raise BadRequest(
                "chat_template_kwargs",
                f"chat_template_kwargs may not set {name}: it has a field of its own",
            )
    if variables.get("documents") and not template.mentions("documents"):
        raise BadRequest(
            "documents", "documents are not read by the model's chat template; allowed: in messages"
        )
    return variables


def _json_object(text: str, param: str) -> dict[str, Any]:
    try:
        value = read_json(text, param, max_values=MAX_FIELD_VALUES)
    except (msgspec.MsgspecError, UnicodeError):
        value = None
    if not isinstance(value, dict):
        raise BadRequest.of(param, text, "a JSON object")
    return value
