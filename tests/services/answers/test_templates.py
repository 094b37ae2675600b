"""Published chat templates as oracle: what a template writes for a conversation with calls is read
back as the same conversation, whole and cut anywhere."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.proto.common_pb2 import AnswerFormat, ChatMessage, Tool
from headwater.proto.processor_pb2 import Conversation
from headwater.services.answers.format import answer_format, reasoning_format_of
from headwater.services.answers.tool_formats import format_of_template
from headwater.services.text.chat_template import ChatTemplate
from tests.services.answers.heard import cut, heard_of

FOLDER = Path(__file__).parent / "templates"
TYPES = {
    "city": "string",
    "note": "string",
    "days": "array",
    "count": "integer",
    "share": "number",
    "deep": "object",
    "is_now": "boolean",
}
SCHEMA = {"type": "object", "properties": {name: {"type": each} for name, each in TYPES.items()}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("weather", "get_time")
]
Call = tuple[str, dict[str, Any]]
ULM: dict[str, Any] = {
    "city": "Ulm",
    "note": 'a "quoted" } < brace,\n& \\ in a text',
    "days": [1, "a", None],
    "count": -3,
    "share": 0.5,
    "deep": {"a": {"b": []}},
    "is_now": True,
}


@dataclass(frozen=True, slots=True)
class Oracle:
    """A template, the names that are found by it, and where its answers end."""

    name: str
    calls: str
    thoughts: str
    end: str
    has_thoughts: bool = True
    """Whether the template writes the thoughts of its last answer."""
    takes_text: bool = False
    """Whether it takes arguments as JSON text only."""
    has_content: bool = True
    """Whether it writes content before calls."""


ORACLES = [
    Oracle("qwen3", "hermes", "qwen3", "<|im_end|>"),
    Oracle(
        "deepseek_v3",
        "deepseek_v3",
        "",
        "<｜end▁of▁sentence｜>",
        has_thoughts=False,
        takes_text=True,
        has_content=False,
    ),
]


def source_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


CALLS: list[Call] = [("weather", ULM), ("get_time", {"city": "0"})]
CONTENT = "One moment."
THOUGHTS = "Hm, so."


@functools.cache
def rendered_answer(oracle: Oracle, num_calls: int) -> str:
    """Text of an answer with calls, as the template writes it behind the request for it."""
    content = CONTENT if oracle.has_content else ""
    template = ChatTemplate(source_of(oracle.name), {"bos_token": "<BOS>", "eos_token": "<EOS>"})
    user = {"role": "user", "content": "Is it warm?"}
    answer = {
        "role": "assistant",
        "content": content or (None if oracle.takes_text else ""),
        "tool_calls": [
            {
                "id": f"abcdefgh{i}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments) if oracle.takes_text else arguments,
                },
            }
            for i, (name, arguments) in enumerate(CALLS[:num_calls])
        ],
    }
    if oracle.has_thoughts:
        answer["reasoning_content"] = THOUGHTS
    variables = {"enable_thinking": True, "thinking": True}
    whole = template.render(
        [user, answer], tools=TOOLS, add_generation_prompt=False, variables=variables
    )
    return behind_prompt(whole.rpartition("Is it warm?")[2]).partition(oracle.end)[0]


@functools.cache
def form_of(oracle: Oracle) -> AnswerFormat:
    source = source_of(oracle.name)
    conversation = Conversation(
        messages=[ChatMessage(role="user", content="Is it warm?")],
        tools=[
            Tool(name=each["function"]["name"], parameters_json=json.dumps(SCHEMA))  # type: ignore[index]
            for each in TOOLS
        ],
    )
    form = answer_format(
        conversation,
        "",
        tool_format=format_of_template(source),
        reasoning_format=reasoning_format_of(source),
    )
    assert form is not None
    return form


def behind_prompt(text: str) -> str:
    """The answer without the mark of its role, which is the prompt's."""
    role = next(role for role in ROLES if role in text)
    return text.partition(role)[2]


ROLES = ("<|im_start|>assistant\n", "<｜Assistant｜>")


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.name)
def test_a_template_says_how_its_model_writes(oracle: Oracle) -> None:
    source = source_of(oracle.name)
    assert (format_of_template(source), reasoning_format_of(source)) == (
        oracle.calls,
        oracle.thoughts,
    )


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.name)
@pytest.mark.parametrize("num_calls", [1, 2])
@settings(max_examples=6, deadline=None)
@given(places=st.lists(st.integers(0, 2000), max_size=12))
def test_a_conversation_that_its_template_writes_is_read_back(
    oracle: Oracle, num_calls: int, places: list[int]
) -> None:
    text = rendered_answer(oracle, num_calls)
    for pieces in (cut(text, places), [text], list(text)):
        heard = heard_of(form_of(oracle), pieces)
        assert heard.calls == CALLS[:num_calls]
        assert heard.content.strip() == (CONTENT if oracle.has_content else "")
        assert heard.reasoning == (THOUGHTS if oracle.has_thoughts else "")
