from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.proto.common_pb2 import ChatMessage, ContentPart, Tool, ToolCall
from headwater.proto.processor_pb2 import Conversation
from headwater.services.processor.conversation import render
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.chat_template import ChatTemplate

SHOW = ChatTemplate(
    "{{ [messages, tools, add_generation_prompt, mood | default(none)] | tojson }}", {}
)
DEEP = '{"a": ' + "[" * 100_000
USER = ChatMessage(role="user", content="hi")
WEATHER = Tool(name="weather", description="now", parameters_json='{"type": "object"}')


def shown(conversation: Conversation) -> list[Any]:
    seen: list[Any] = json.loads(render(SHOW, conversation))
    return seen


def test_text_parts_become_lines_of_one_text() -> None:
    message = ChatMessage(
        role="user", parts=[ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    )
    assert shown(Conversation(messages=[message]))[0] == [{"role": "user", "content": "a\nb"}]


def test_calls_and_tools_look_as_templates_expect_them() -> None:
    call = ToolCall(id="c1", name="weather", arguments='{"city": "Ulm"}')
    messages = [
        USER,
        ChatMessage(role="assistant", tool_calls=[call], reasoning_content="hm"),
        ChatMessage(role="tool", content="3 °C", tool_call_id="c1", name="weather"),
    ]
    seen, tools, *_ = shown(Conversation(messages=messages, tools=[WEATHER], tool_choice="auto"))
    function = {"name": "weather", "arguments": {"city": "Ulm"}}
    assert seen[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        "reasoning_content": "hm",
    }
    assert seen[2] == {"role": "tool", "content": "3 °C", "tool_call_id": "c1", "name": "weather"}
    parameters = {"type": "object"}
    assert tools == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "now", "parameters": parameters},
        }
    ]


def test_a_prompt_for_the_answer_is_the_default_unless_the_last_message_goes_on() -> None:
    assert shown(Conversation(messages=[USER]))[2] is True
    assert shown(Conversation(messages=[USER], add_generation_prompt=False))[2] is False
    going_on = Conversation(messages=[USER], continue_final_message=True)
    assert '"hi' in render(SHOW, going_on)
    assert render(SHOW, going_on).endswith("hi")


def test_variables_of_the_template_come_as_json() -> None:
    assert (
        shown(Conversation(messages=[USER], chat_template_kwargs_json='{"mood": "calm"}'))[3]
        == "calm"
    )


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"city": "Ulm"}', {"city": "Ulm"}),
        ('{"city": "Ul', {"arguments": '{"city": "Ul'}),
        ("[1]", {"arguments": "[1]"}),
        ('"s"', {"arguments": '"s"'}),
        ('{"n": 1e999}', {"arguments": '{"n": 1e999}'}),
        (DEEP, {"arguments": DEEP}),
        ("null", {}),
        ("", {}),
    ],
    ids=["an object", "cut", "a list", "a string", "no number", "deep", "null", "nothing"],
)
def test_arguments_that_a_model_wrote_are_never_refused(
    written: str, arguments: dict[str, Any]
) -> None:
    call = ToolCall(name="f", arguments=written)
    message = ChatMessage(role="assistant", tool_calls=[call])
    [[rendered], *_] = shown(Conversation(messages=[message]))
    assert rendered["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("conversation", "param", "sentence"),
    [
        (Conversation(), "messages", "messages is []; allowed: at least one message"),
        (
            Conversation(messages=[USER, ChatMessage(role="wizard", content="x")]),
            "messages[1].role",
            "messages[1].role is 'wizard'; allowed: system, developer, user, assistant, tool",
        ),
        (
            Conversation(messages=[ChatMessage(role="user")]),
            "messages[0].content",
            "a string or a list of text parts",
        ),
        (
            Conversation(
                messages=[ChatMessage(role="user", parts=[ContentPart(type="image_url")])]
            ),
            "messages[0].content[0].type",
            "messages[0].content[0].type is 'image_url'; allowed: text",
        ),
        (
            Conversation(messages=[USER], tools=[Tool(name="f", parameters_json="{")]),
            "tools[0].function.parameters",
            "is '{'; allowed: a JSON object",
        ),
        (
            Conversation(messages=[USER], tool_choice="auto"),
            "tool_choice",
            "tool_choice is 'auto' without tools",
        ),
        (
            Conversation(messages=[USER], tools=[WEATHER], tool_choice="rain"),
            "tool_choice",
            "tool_choice is 'rain'; allowed: none, auto, required or one of ['weather']",
        ),
        (
            Conversation(
                messages=[USER], tools=[WEATHER], tool_choice="auto", tool_choice_is_name=True
            ),
            "tool_choice",
            "tool_choice is 'auto'; allowed: one of ['weather']",
        ),
        (
            Conversation(messages=[USER], tools=[WEATHER], tool_choice_is_name=True),
            "tool_choice",
            "tool_choice is ''; allowed: one of ['weather']",
        ),
        (
            Conversation(messages=[USER], continue_final_message=True, add_generation_prompt=True),
            "continue_final_message",
            "continue_final_message excludes add_generation_prompt",
        ),
        (
            Conversation(messages=[USER], chat_template_kwargs_json='{"messages": []}'),
            "chat_template_kwargs",
            "chat_template_kwargs may not set messages",
        ),
        (
            Conversation(messages=[USER], chat_template_kwargs_json="no"),
            "chat_template_kwargs",
            "a JSON object",
        ),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused_by_field(
    conversation: Conversation, param: str, sentence: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        render(SHOW, conversation)
    assert caught.value.param == param
    assert sentence in caught.value.message


@pytest.mark.parametrize(
    ("schema", "is_taken"),
    [
        ({"type": "string"}, False),
        ({"type": ["array", "null"], "items": {}}, False),
        ({"const": 3}, False),
        ({"enum": ["a", "b"]}, False),
        ({"type": "object"}, True),
        ({"type": ["object", "null"]}, True),
        ({"properties": {"type": {"type": "string"}}}, True),
        ({"enum": [{"a": 1}, None]}, True),
        ({}, True),
    ],
    ids=str,
)
def test_parameters_of_a_function_are_a_schema_of_objects(
    schema: dict[str, Any], is_taken: bool
) -> None:
    conversation = Conversation(
        messages=[USER], tools=[WEATHER, Tool(name="f", parameters_json=json.dumps(schema))]
    )
    if is_taken:
        assert render(SHOW, conversation)
        return
    with pytest.raises(BadRequest) as caught:
        render(SHOW, conversation)
    assert caught.value.param == "tools[1].function.parameters"
    assert caught.value.message.endswith("; allowed: a JSON Schema of an object")


PLAIN = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}", {})


def test_a_template_that_knows_no_tools_shows_them_as_text() -> None:
    call = ToolCall(id="c1", name="weather", arguments='{"city": "Ulm"}')
    results = [
        ChatMessage(role="tool", content=text, tool_call_id="c1") for text in ("3 °C", "rain")
    ]
    messages = [
        ChatMessage(role="developer", content="Be brief."),
        USER,
        ChatMessage(role="assistant", tool_calls=[call]),
    ]
    text = render(PLAIN, Conversation(messages=[*messages, *results], tools=[WEATHER]))
    assert text.startswith("[system] Be brief.\n\nYou can call functions.")
    assert '{"name": "weather", "description": "now", "parameters": {"type": "object"}}' in text
    assert (
        '[assistant] <tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
        in text
    )
    assert text.count("[user]") == 2
    assert (
        "[user] <tool_response>\n3 °C\n</tool_response>\n<tool_response>\nrain\n</tool_response>\n"
        in text
    )
    assert "call functions" not in render(
        PLAIN, Conversation(messages=[USER], tools=[WEATHER], tool_choice="none")
    )
    assert render(PLAIN, Conversation(messages=[USER], tools=[WEATHER])).startswith(
        "[system] You can call functions."
    )


def test_effort_is_given_to_templates_that_read_it() -> None:
    template = ChatTemplate(
        "{{ messages | length }} {{ reasoning_effort }} {{ enable_thinking }}", {}
    )
    assert render(template, Conversation(messages=[USER], reasoning_effort="low")) == "1 low True"
    assert (
        render(template, Conversation(messages=[USER], reasoning_effort="none")) == "1 none False"
    )
    overruled = Conversation(
        messages=[USER],
        reasoning_effort="low",
        chat_template_kwargs_json='{"enable_thinking": false}',
    )
    assert render(template, overruled) == "1 low False"
