"""Messages of Anthropic's in the contract's form, and the client's names of their fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.gateway.anthropic.attribution import without_attribution
from headwater.gateway.anthropic.decode import decode
from headwater.gateway.anthropic.schema import MessagesRequest
from headwater.gateway.anthropic.to_pb import names_of, to_prompt, to_sampling
from headwater.proto.processor_pb2 import Conversation

LINE = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
USER = {"role": "user", "content": "Now?"}


def asked(*messages: Any, **more: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": messages or [USER], **more}
    return decode(json.dumps(body).encode(), MessagesRequest)


def conversation(*messages: Any, **more: Any) -> Conversation:
    return to_prompt(asked(*messages, **more)).conversation


def roles(made: Conversation) -> list[tuple[str, str]]:
    return [
        (each.role, each.content or "|".join(part.text for part in each.parts))
        for each in made.messages
    ]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (LINE, ""),
        (f"{LINE}\nYou are an agent.", "You are an agent."),
        (f"Say {LINE}", f"Say {LINE}"),
        ("", ""),
    ],
)
def test_the_line_of_attribution_is_left_out_at_the_beginning_alone(text: str, left: str) -> None:
    assert without_attribution(text) == left


@pytest.mark.parametrize(
    ("system", "texts"),
    [
        (None, []),
        ("", []),
        (LINE, []),
        (f"{LINE}\nBe brief.", [("system", "Be brief.")]),
        ([{"type": "text", "text": LINE}, {"type": "text", "text": "a"}], [("system", "a")]),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], [("system", "a|b")]),
    ],
)
def test_a_system_prompt_is_the_first_message_unless_it_is_empty(
    system: Any, texts: list[tuple[str, str]]
) -> None:
    assert roles(conversation(system=system)) == [*texts, ("user", "Now?")]


def test_results_of_tools_are_messages_in_the_order_of_their_blocks() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "tool_result", "tool_use_id": "3", "content": [{"type": "text", "text": "c"}]},
    ]
    made = conversation({"role": "user", "content": content})
    assert roles(made) == [("tool", "one"), ("tool", ""), ("user", "a|b"), ("tool", "c")]
    assert [each.tool_call_id for each in made.messages if each.role == "tool"] == ["1", "2", "3"]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    begun: dict[str, Any] = {"role": "assistant", "content": "one"}
    thought = {"type": "thinking", "thinking": "a"}
    rest = {"role": "assistant", "content": [thought, {"type": "text", "text": "two"}]}
    made = conversation(USER, USER, begun, rest)
    assert roles(made) == [("user", "Now?|Now?"), ("assistant", "one|two")]
    assert made.messages[1].reasoning_content == "a"
    assert made.continue_final_message


def test_a_system_message_behind_the_first_turn_is_a_part_of_a_turn_of_a_user() -> None:
    system = {"role": "system", "content": "s"}
    reminder = "<system-reminder>\ns\n</system-reminder>"
    made = conversation(system, USER, system, {"role": "assistant", "content": "a"}, system)
    assert roles(made) == [
        ("system", "s"),
        ("user", f"Now?|{reminder}"),
        ("assistant", "a"),
        ("user", reminder),
    ]
    assert not made.continue_final_message
    assert roles(conversation(system, USER, system="t"))[0] == ("system", "t|s")


def test_thoughts_and_calls_of_an_answer_are_of_its_message() -> None:
    content = [
        {"type": "thinking", "thinking": "a", "signature": "s"},
        {"type": "redacted_thinking", "data": "sealed"},
        {"type": "thinking", "thinking": "b", "signature": ""},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": [1]}},
    ]
    made = conversation(USER, {"role": "assistant", "content": content})
    message = made.messages[1]
    assert (message.reasoning_content, message.content) == ("a\nb", "")
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == [
        ("1", "f", '{"x":[1]}')
    ]
    assert not made.continue_final_message


@pytest.mark.parametrize(
    ("fields", "effort", "variables", "shows"),
    [
        ({}, "", "", True),
        ({"thinking": {"type": "disabled"}}, "none", "", True),
        ({"thinking": {"type": "adaptive"}}, "", "enable_thinking", True),
        ({"output_config": {"effort": "low"}}, "low", "", True),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            "max",
            "",
            True,
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
            "none",
            "",
            True,
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}},
            "",
            "enable_thinking",
            False,
        ),
    ],
)
def test_the_template_gets_whether_the_model_thinks(
    fields: dict[str, Any], effort: str, variables: str, shows: bool
) -> None:
    made = conversation(**fields)
    assert made.reasoning_effort == effort
    assert variables in made.chat_template_kwargs_json
    assert bool(made.chat_template_kwargs_json) == bool(variables)
    assert (not made.HasField("include_reasoning") or made.include_reasoning) == shows
    assert made.thoughts_are_optional == (fields.get("thinking", {}).get("type") == "enabled")


def test_sampling_has_the_fields_that_were_given_alone() -> None:
    plain = to_sampling(asked())
    assert [field.name for field, _ in plain.ListFields()] == ["max_tokens"]
    more = {
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["a"],
        "temperature": 0,
        "top_k": 3,
        "top_p": 0.5,
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    sampling = to_sampling(asked(**more))
    assert (sampling.thinking_token_budget, sampling.stop) == (5, ["a"])
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 3, 0.5)
    assert sampling.HasField("temperature")
    assert json.loads(sampling.structured_output.json_schema) == {"type": "object"}


def test_fields_have_the_names_that_the_client_gave_them() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}, call]}
    tools = [{"type": "web_search_20250305"}, {"name": "f", "input_schema": {}}]
    names = names_of(asked(USER, answer, USER, system="s", tools=tools))
    assert names["messages[2].tool_calls[0].function.arguments"] == "messages[1].content[1].input"
    assert names["messages[3].content"] == "messages[2].content"
    assert names["tools[0].function.parameters"] == "tools[1].input_schema"
