"""Namespaces of tools, tools that OpenAI hosts, and their items in the history of a response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headwater.gateway.openai.decode import decode
from headwater.gateway.openai.response_input import items_of, to_prompt
from headwater.gateway.openai.response_schema import ResponsesRequest
from headwater.gateway.openai.response_tools import ResponseTools
from headwater.services.runtime.errors import BadRequest
from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import Gateway

ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
WEB: Any = {"type": "web_search", "external_web_access": True}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "strict": False, "parameters": ZONE, **more}


def group(namespace: str, *tools: dict[str, Any]) -> Any:
    about = f"Tools in the {namespace} namespace."
    return {"type": "namespace", "name": namespace, "description": about, "tools": list(tools)}


def asked(*tools: Any, **more: Any) -> ResponsesRequest:
    body = {"model": "m", "input": "x", "tools": tools, **more}
    return decode(json.dumps(body).encode(), ResponsesRequest)


def names(*tools: Any) -> list[str]:
    return [tool.name for tool in ResponseTools(asked(*tools).tools).to_pb()]


LONG = "n" * 64
CLOCK = group("mcp__clock", function("time", description="Tells the time."), function("zones"))


@pytest.fixture(scope="module")
def client(thinker: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.rest}/v1", api_key="any", max_retries=0) as official:
        yield official


def test_tools_of_namespaces_are_offered_under_names_that_differ() -> None:
    assert names(function("time"), CLOCK) == ["time", "mcp__clock__time", "mcp__clock__zones"]
    assert names(group("a", function("time")), group("b", function("time"))) == [
        "a__time",
        "b__time",
    ]
    [plain, hashed] = names(function("a__time"), group("a", function("time")))
    assert (plain, hashed[:8]) == ("a__time", "a__time_")
    alike = names(group("a", function("b__c")), group("a__b", function("c")))
    assert len(set(alike)) == 2
    long = names(group(LONG, function(LONG), function(LONG[1:])))
    assert len(set(long)) == 2
    assert {len(name) for name in long} == {64}


def test_a_namespace_introduces_itself_with_its_first_tool() -> None:
    first, second = ResponseTools(asked(CLOCK).tools).to_pb()
    assert first.description == "Tools in the mcp__clock namespace.\n\nTells the time."
    assert second.description == ""


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "zones", "namespace": "mcp__clock"}, "mcp__clock__zones"),
        ({"type": "function", "name": "zones"}, "mcp__clock__zones"),
        ({"type": "function", "name": "time"}, "time"),
        ({"type": "function", "name": "time", "namespace": "mcp__clock"}, "mcp__clock__time"),
        ({"type": "function", "name": "mcp__clock__time"}, "mcp__clock__time"),
    ],
)
def test_a_tool_of_a_namespace_is_chosen_by_its_names(choice: Any, name: str) -> None:
    request = asked(function("time"), CLOCK, tool_choice=choice)
    assert ResponseTools(request.tools).choice_to_pb(request).tool_choice == name


def test_a_name_that_two_namespaces_have_does_not_choose_one() -> None:
    both = [group("a", function("time")), group("b", function("time"))]
    request = asked(*both, tool_choice={"type": "function", "name": "time"})
    assert ResponseTools(request.tools).choice_to_pb(request).tool_choice == "time"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (group("a b", function("f")), "tools[0].name"),
        (group("a", function("f g")), "tools[0].tools[0].name"),
        (group("a", {"type": "function"}), "tools[0].tools[0].name"),
        (group("a", {"type": "web_search"}), "tools[0].tools[0].type"),
        ({"type": "namespace"}, "tools[0].name"),
    ],
)
def test_what_is_wrong_in_a_namespace_is_named(tool: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        names(tool)
    assert refused.value.param == param


def test_an_earlier_call_has_the_name_that_its_tool_is_offered_under() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "time", "namespace": "mcp__clock"}
    for tools in ((function("mcp__clock__time"), CLOCK), (CLOCK,), ()):
        request = asked(*tools, input=[call])
        prompt = to_prompt(request, items_of(request), first=0)
        [message] = prompt.conversation.messages
        offered = [tool.name for tool in prompt.conversation.tools if tool.description]
        expected = offered[0] if offered else "mcp__clock__time"
        assert message.tool_calls[0].name == expected


@pytest.mark.parametrize("tool", ["time", "zones"])
def test_a_call_goes_back_with_its_namespace_and_history_has_it(
    client: openai.OpenAI, thinker: Gateway, tool: str
) -> None:
    fields: Any = {
        "model": MODEL,
        "tools": [function("time"), WEB, CLOCK],
        "temperature": 0,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "none"},
    }
    chosen: Any = {"type": "function", "name": tool, "namespace": "mcp__clock"}
    whole: Any = client.responses.create(**fields, input="When?", tool_choice=chosen)
    [call] = whole.output
    assert (call.namespace, call.name) == ("mcp__clock", tool)
    assert json.loads(call.arguments) == {"zone": "UTC"}
    assert [each.type for each in whole.tools] == ["function", "namespace"]

    events: Any = list(
        client.responses.create(**fields, input="When?", tool_choice=chosen, stream=True)
    )
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(each.namespace, each.name) for each in items] == [("mcp__clock", tool)]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert (done.name, done.arguments) == (tool, call.arguments)

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    rest: Any = {**fields, "tool_choice": "auto", "max_output_tokens": 4}
    after = client.responses.create(**rest, input=[result], previous_response_id=whole.id)
    spelled: Any = [{"role": "user", "content": "When?"}, call.to_dict(), result]
    same = client.responses.create(**rest, input=spelled, store=False)
    assert after.usage.input_tokens == same.usage.input_tokens  # type: ignore[union-attr]
    assert after.output_text == same.output_text


def test_hosted_tools_are_passed_over_and_named_in_the_log(thinker: Gateway) -> None:
    body = {"model": MODEL, "input": "x", "max_output_tokens": 4, "store": False}
    for kind in ("web_search", "tool_search", "local_shell", "image_generation", "mcp",
                 "file_search", "code_interpreter", "computer_use"):  # fmt: skip
        fields = {"tools": [{"type": kind, "server_label": "s"}], "tool_choice": "auto"}
        reply = thinker.client.post("/v1/responses", json=body | fields)
        assert (reply.status_code, reply.json()["tools"]) == (200, []), reply.text
        thinker.wait_until(lambda kind=kind: thinker.stage.says(f'"type": "{kind}"'))  # type: ignore[misc]
        assert thinker.stage.says("hosted tool passed over")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "web_search"}, "tool_choice.type"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
            "tool_choice.tools[0].type",
        ),
        ("required", "tool_choice"),
    ],
)
def test_a_choice_of_a_hosted_tool_is_refused(thinker: Gateway, choice: Any, param: str) -> None:
    body = {"model": MODEL, "input": "x", "tools": [WEB], "tool_choice": choice}
    reply = thinker.client.post("/v1/responses", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


SHELL = [
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "c1",
        "status": "completed",
        "action": {"type": "exec", "command": ["date"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "c1", "output": "noon"},
    {
        "type": "shell_call",
        "call_id": "c2",
        "action": {"commands": ["date"]},
    },
    {
        "type": "shell_call_output",
        "call_id": "c2",
        "output": [{"stdout": "late", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    {
        "type": "apply_patch_call",
        "call_id": "c3",
        "status": "completed",
        "operation": {"type": "delete_file", "path": "a.py"},
    },
    {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed"},
]
OTHERS = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "file_search_call", "id": "fs_1", "queries": ["a"], "results": None},
    {"type": "image_generation_call", "id": "ig_1", "result": "aGk=", "status": "completed"},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c"},
    {"type": "computer_call", "id": "cc_1", "call_id": "c", "action": {"type": "click"}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "mcp_list_tools", "id": "ml_1", "server_label": "s", "tools": []},
    {"type": "mcp_call", "id": "mc_1", "name": "f", "arguments": "{", "output": "x"},
    {"type": "mcp_approval_request", "id": "ma_1", "name": "f", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "ma_1", "approve": True},
    {"type": "tool_search_call", "call_id": None, "arguments": {"query": "a"}},
    {"type": "tool_search_output", "call_id": None, "tools": []},
]


def test_items_of_hosted_tools_are_part_of_a_history(
    thinker: Gateway, client: openai.OpenAI
) -> None:
    def num_tokens(*items: Any) -> int:
        printed = [{"role": "user", "content": "When?"}, *items]
        counted = thinker.client.post(
            "/v1/responses/input_tokens", json={"model": MODEL, "input": printed}
        )
        assert counted.status_code == 200, counted.text
        return int(counted.json()["input_tokens"])

    alone = num_tokens()
    assert [num_tokens(item) for item in OTHERS] == [alone] * len(OTHERS)
    grown = [num_tokens(*SHELL[:i]) for i in range(len(SHELL) + 1)]
    assert grown == sorted(set(grown)), "each call and each result is in the prompt"
    reply: Any = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "When?"}, *SHELL, *OTHERS],  # type: ignore[list-item]
        max_output_tokens=4,
    )
    listed = client.responses.input_items.list(reply.id, limit=100).data
    assert len(listed) == 1 + len(SHELL) + len(OTHERS)
    again: Any = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=reply.id, max_output_tokens=4
    )
    assert again.status == "incomplete"


@pytest.mark.parametrize("arguments", ['{"zone": "U', "null", "[]", '"s"', "", None])
def test_a_call_that_was_cut_goes_on_as_it_came(thinker: Gateway, arguments: str | None) -> None:
    item = {"type": "function_call", "call_id": "c", "name": "time", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "?"}
    body = {"model": MODEL, "input": [{"role": "user", "content": "x"}, item, output]}
    reply = thinker.client.post("/v1/responses", json=body | {"max_output_tokens": 2})
    assert reply.status_code == 200, reply.text
    called = {"id": "c", "type": "function", "function": {"name": "time", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "?"},
    ]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 2}
    reply = thinker.client.post("/v1/chat/completions", json=chat)
    assert reply.status_code == 200, reply.text
    legacy = [
        messages[0],
        {"role": "assistant", "function_call": {"name": "time", "arguments": arguments}},
        {"role": "function", "name": "time", "content": "?"},
    ]
    reply = thinker.client.post("/v1/chat/completions", json=chat | {"messages": legacy})
    assert reply.status_code == 200, reply.text


def test_a_response_whose_call_was_cut_has_a_next_turn(thinker: Gateway) -> None:
    body = {
        "model": MODEL,
        "input": "When?",
        "tools": [function("time")],
        "tool_choice": {"type": "function", "name": "time"},
        "max_output_tokens": 16,
        "temperature": 0,
        "reasoning": {"effort": "none"},
    }
    first = thinker.client.post("/v1/responses", json=body).json()
    assert first["status"] == "incomplete"
    [call] = first["output"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "?"}
    after = {"input": [result], "previous_response_id": first["id"], "tool_choice": "none"}
    reply = thinker.client.post("/v1/responses", json=body | after)
    assert reply.status_code == 200, reply.text
