"""Selects the format by which the answer to a conversation is read: its calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.proto.common_pb2 import AnswerFormat
from headwater.proto.processor_pb2 import Conversation

from . import harmony_parser as harmony
from .argument_types import tool_types
from .marked_formats import MARKED_FORMATS
from .reasoning_parser import REASONING_FORMATS

ENFORCING = "required"
NAMED_CHOICES = ("auto", "none", ENFORCING)
FRAMED = ("gpt_oss",)
"""Formats whose parsers also read answers without calls, which stand between marks."""

SIGNS: Mapping[str, tuple[str, ...]] = {
    "magistral": ("[THINK]",),
    "gpt_oss": (harmony.CHANNEL, harmony.MESSAGE),
    "gemma4": ("<|channel>",),
    "command": ("<|END_THINKING|>",),
    "seed_oss": ("<seed:think>",),
    "granite": ("Here is my thought process:",),
    "granite33": ("</think>", "<response></response>"),
    "hy_v3": ("<think", ":opensource"),
    "hunyuan_a13b": ("</think>", "</answer>"),
    "apertus": ("<|inner_prefix|>",),
}
"""Texts of the chat templates of models whose thoughts have marks of their own."""


def named_tool(conversation: Conversation) -> str | None:
    """The function that the client named in its tool choice, if it named one."""
    choice = conversation.tool_choice
    return (
        choice if conversation.tool_choice_is_name or choice not in ("", *NAMED_CHOICES) else None
    )


def may_call(conversation: Conversation) -> bool:
    return bool(conversation.tools) and (
        conversation.tool_choice_is_name or conversation.tool_choice != "none"
    )


def answer_format(
    conversation: Conversation, rendered: str, *, tool_format: str, reasoning_format: str
) -> AnswerFormat | None:
    """Format of the answer; None where all of it is content. `rendered` is the prompt's text, which
    may have opened the reasoning."""
    form = AnswerFormat()
    if tool_format in FRAMED and not may_call(conversation):
        form.tool_parser = tool_format
    if tool_format and may_call(conversation):
        chosen = named_tool(conversation)
        form.tool_parser = tool_format
        form.tool_names.extend(tool.name for tool in conversation.tools)
        form.custom_names.extend(
            tool.name for tool in conversation.tools if tool.HasField("custom_input")
        )
        if (
            marked := MARKED_FORMATS.get(tool_format)
        ) is not None and marked.parameters is not None:
            form.tool_types.extend(map(tool_types, conversation.tools))
        # A client that chose one function wants one call.
        form.named_call = chosen is not None
        form.single_call = form.named_call or not _is_parallel(conversation)
    if (
        reasoning_format
        and (starts_inside := _starts_inside(conversation, rendered, reasoning_format)) is not None
    ):
        form.reasoning_parser = reasoning_format
        form.starts_in_reasoning = starts_inside
        form.omit_reasoning = (
            conversation.HasField("include_reasoning") and not conversation.include_reasoning
        )
    return form if form.tool_parser or form.reasoning_parser else None


def _is_parallel(conversation: Conversation) -> bool:
    return not conversation.HasField("parallel_tool_calls") or conversation.parallel_tool_calls


def _starts_inside(conversation: Conversation, rendered: str, reasoning_format: str) -> bool | None:
    """Whether the answer begins inside the reasoning; None where the prompt has closed it."""
    marks = REASONING_FORMATS[reasoning_format]
    if conversation.continue_final_message:
        final = conversation.messages[-1]
        text = final.content or "".join(part.text for part in final.parts)
        return True if text.rfind(marks.start) > text.rfind(marks.end) else None
    prompt = rendered.rstrip()
    if prompt.endswith(marks.ends):
        return None
    return marks.is_implied or prompt.endswith(marks.starts)


def reasoning_format_of(template: str | None) -> str:
    """Name of the reasoning format that the model's chat template uses; empty where it uses
    none."""
    source = template or ""
    marked = (name for name, signs in SIGNS.items() if all(sign in source for sign in signs))
    if (found := next(marked, "")) or "</think>" not in source:
        return found
    if "enable_thinking" in source:
        return "qwen3"
    return "deepseek_r1" if "<｜Assistant｜>" in source else "think"
