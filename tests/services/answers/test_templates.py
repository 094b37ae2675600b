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
from tests.services.answers.received_answer import cut, receive

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """A template, the names that are found by it, and what stands around its answers."""

    name: str
    calls: str
    thoughts: str = ""
    role: str
    """Text between the request and the answer, which the prompt has."""
    end: str = "END"
    thoughts_key: str = ""
    """Field of a message whose thoughts the template writes in its last answer."""
    takes_text: bool = False
    """Whether it takes arguments as JSON text only."""
    has_content: bool = True
    """Whether it writes content before calls."""
    most_calls: int = 2


ORACLES = [
    Oracle(name="apertus", calls="apertus", thoughts="apertus", role="<|assistant_start|>"),
    Oracle(
        name="deepseek_v3",
        calls="deepseek_v3",
        role="<｜Assistant｜>",
        end="<｜end▁of▁sentence｜>",
        takes_text=True,
        has_content=False,
    ),
    Oracle(
        name="deepseek_v31",
        calls="deepseek_v31",
        thoughts="qwen3",
        role="<｜Assistant｜><think></think>",
        end="<｜end▁of▁sentence｜>",
    ),
    Oracle(
        name="gemma4",
        calls="gemma4",
        thoughts="gemma4",
        role="<|turn>model\n",
        end="<|tool_response>",
        thoughts_key="reasoning_content",
    ),
    Oracle(name="gigachat3", calls="gigachat3", role="assistant<|role_sep|>\n", most_calls=1),
    Oracle(
        name="glm46",
        calls="glm45",
        thoughts="qwen3",
        role="<|assistant|>",
        thoughts_key="reasoning_content",
    ),
    Oracle(
        name="glm47",
        calls="glm47",
        thoughts="qwen3",
        role="<|assistant|>",
        thoughts_key="reasoning_content",
    ),
    Oracle(
        name="gpt_oss",
        calls="gpt_oss",
        thoughts="gpt_oss",
        role="<|start|>assistant",
        thoughts_key="thinking",
        has_content=False,
        most_calls=1,
    ),
    Oracle(name="kimi_k2", calls="kimi_k2", role="<|im_middle|>", end="<|im_end|>"),
    Oracle(
        name="minimax_m1",
        calls="minimax_m1",
        role="ai name=assistant\n",
        end="<end_of_sentence>",
        has_content=False,
    ),
    Oracle(
        name="minimax_m2",
        calls="minimax_m2",
        thoughts="think",
        role="]~b]ai\n",
        end="[e~[",
        thoughts_key="reasoning_content",
    ),
    Oracle(
        name="mistral_small",
        calls="mistral_tekken",
        role="[/INST]",
        end="<EOS>",
        has_content=False,
    ),
    Oracle(
        name="qwen3",
        calls="hermes",
        thoughts="qwen3",
        role="<|im_start|>assistant\n",
        end="<|im_end|>",
        thoughts_key="reasoning_content",
    ),
    Oracle(
        name="qwen3_coder",
        calls="qwen3_coder",
        role="<|im_start|>assistant\n",
        end="<|im_end|>",
    ),
    Oracle(
        name="seed_oss",
        calls="seed_oss",
        thoughts="seed_oss",
        role="<seed:bos>assistant\n",
        end="<seed:eos>",
        thoughts_key="reasoning_content",
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
    if oracle.thoughts_key:
        answer[oracle.thoughts_key] = THOUGHTS
    variables = {"enable_thinking": True, "thinking": True}
    whole = template.render(
        [user, answer], tools=TOOLS, add_generation_prompt=False, variables=variables
    )
    written = whole.rpartition("Is it warm?")[2]
    return written.partition(oracle.role)[2].partition(oracle.end)[0]


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


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.name)
def test_a_template_says_how_its_model_writes(oracle: Oracle) -> None:
    source = source_of(oracle.name)
    assert (format_of_template(source), reasoning_format_of(source)) == (
        oracle.calls,
        oracle.thoughts,
    )


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.name)
@settings(max_examples=6, deadline=None)
@given(places=st.lists(st.integers(0, 2000), max_size=12))
def test_a_conversation_that_its_template_writes_is_read_back(
    oracle: Oracle, places: list[int]
) -> None:
    for num_calls in range(1, oracle.most_calls + 1):
        text = rendered_answer(oracle, num_calls)
        for pieces in (cut(text, places), [text], list(text)):
            received = receive(form_of(oracle), pieces)
            assert received.calls == CALLS[:num_calls]
            assert received.content.strip() == (CONTENT if oracle.has_content else "")
            assert received.reasoning == (THOUGHTS if oracle.thoughts_key else "")
