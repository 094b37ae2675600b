"""Calls that an answer has to make, or whose form is held to schemas."""

from __future__ import annotations

from headwater.proto.processor_pb2 import Conversation

from ..answers.format import may_call, named_tool
from ..answers.forms import Form
from ..answers.tool_formats import TOOL_FORMATS
from .offered_tools import all_offered, is_due_to_call, is_held, makes_one_call


def calls_due(conversation: Conversation, tool_format: str) -> Form | None:
    """Grammar of an answer that has to call, or whose calls must match strict schemas; None: it is
    free."""
    if not tool_format or not may_call(conversation):
        return None
    chosen = named_tool(conversation)
    form = TOOL_FORMATS[tool_format]
    is_due = is_due_to_call(conversation)
    if not (is_due or conversation.allowed_tools or any(map(is_held, conversation.tools))):
        return None
    tools = all_offered(conversation)
    if chosen is not None:
        return form.calls([tool for tool in tools if tool.name == chosen], True)
    return (
        form.calls(tools, makes_one_call(conversation))
        if is_due
        else form.free(tools, makes_one_call(conversation))
    )


def calls_win(conversation: Conversation, tool_format: str) -> bool:
    """Whether an enforced `tool_choice` makes the answer a call, whatever the constraint on its
    content.

    OpenAI and vLLM answer so, and clients send such requests by themselves.
    """
    return bool(tool_format) and may_call(conversation) and is_due_to_call(conversation)


def calls_instead(conversation: Conversation, tool_format: str) -> Form | None:
    """Calls that an answer may have in place of constrained content; None: it may not call."""
    if not tool_format or not may_call(conversation):
        return None
    return TOOL_FORMATS[tool_format].instead(
        all_offered(conversation), makes_one_call(conversation)
    )
