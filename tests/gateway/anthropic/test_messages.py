"""/v1/messages and /v1/messages/count_tokens over HTTP: tools, ends of answers, usage, headers and
errors."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from headwater.gateway.anthropic.models import page_of_models
from headwater.services.runtime.errors import BadRequest
from tests.gateway.processes import MODEL as THOUGHTLESS
from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import Gateway
from tests.gateway.request.test_explain import begun_before_its_deadline

PATH = "/v1/messages"
USER = [{"role": "user", "content": "What time is it?"}]
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TIME = {"name": "time", "description": "Tells the time.", "input_schema": ZONE}
QUIET: dict[str, Any] = {"thinking": {"type": "disabled"}, "temperature": 0}


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 60, "messages": USER} | QUIET | more


def ask(gateway: Gateway, **more: Any) -> dict[str, Any]:
    reply = gateway.client.post(PATH, json=body(**more))
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()
    return message


def refused(reply: httpx.Response) -> tuple[int, str, str]:
    """Status, type and sentence of a refusal, whose envelope is checked."""
    envelope = reply.json()
    assert envelope.keys() == {"type", "error", "request_id"}
    assert envelope["type"] == "error"
    assert reply.headers["request-id"] == envelope["request_id"] == reply.headers["x-request-id"]
    return reply.status_code, envelope["error"]["type"], envelope["error"]["message"]


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "time"}], ids=lambda each: each["type"]
)
def test_a_call_that_is_due_ends_the_answer_as_tool_use(
    thinker: Gateway, choice: dict[str, Any]
) -> None:
    tool_choice = choice | {"disable_parallel_tool_use": True}
    message = ask(thinker, tools=[TIME], tool_choice=tool_choice)
    [call] = message["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "time", {"zone": "UTC"})
    assert call["id"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


def test_tools_are_not_called_where_the_choice_is_none(thinker: Gateway) -> None:
    message = ask(thinker, tools=[TIME], tool_choice={"type": "none"}, max_tokens=4)
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "max_tokens"


def test_a_call_that_is_cut_keeps_what_there_is_of_its_input(thinker: Gateway) -> None:
    tool_choice = {"type": "tool", "name": "time"}
    message = ask(thinker, tools=[TIME], tool_choice=tool_choice, max_tokens=14)
    [call] = message["content"]
    assert (call["name"], message["stop_reason"]) == ("time", "max_tokens")
    assert call["input"]["arguments"]


def test_an_answer_ends_with_its_stop_sequence_and_matches_its_schema(thinker: Gateway) -> None:
    schema = {"type": "object", "properties": {"river": {"const": "Blau"}}, "required": ["river"]}
    output_config = {"format": {"type": "json_schema", "schema": schema}}
    whole = ask(thinker, output_config=output_config)
    assert json.loads(whole["content"][0]["text"])["river"] == "Blau"
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    cut = ask(thinker, output_config=output_config, stop_sequences=["Blau", "Donau"])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "Blau")
    assert cut["content"][0]["text"] == whole["content"][0]["text"].split("Blau")[0]


def test_a_message_is_explained_by_its_id(thinker: Gateway) -> None:
    message = ask(thinker, max_tokens=2)
    known = thinker.client.get(f"/v1/requests/{message['id']}/explain")
    assert known.status_code == 200, known.text


def test_an_answer_goes_on_with_the_last_message(thinker: Gateway) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    chat = {"model": MODEL, "messages": begun, "max_tokens": 6, "temperature": 0}
    more = {"continue_final_message": True, "reasoning_effort": "none"}
    same = thinker.client.post("/v1/chat/completions", json=chat | more).json()
    message = ask(thinker, messages=begun, max_tokens=6)
    assert message["content"][0]["text"] == same["choices"][0]["message"]["content"]
    usage = message["usage"]
    num_prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt_tokens == same["usage"]["prompt_tokens"]


def test_tokens_that_were_found_in_a_cache_are_counted_apart(thinker: Gateway) -> None:
    system = [
        {"type": "text", "text": "A river. " * 60, "cache_control": {"type": "ephemeral"}},
    ]

    def usage(cch: str) -> dict[str, int]:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={cch};"}
        counts: dict[str, int] = ask(thinker, system=[line, *system], max_tokens=2)["usage"]
        return counts

    first, second = usage("11111"), usage("22222")
    assert (first["cache_read_input_tokens"], first["cache_creation_input_tokens"]) == (0, 0)
    assert second["cache_read_input_tokens"] > 100
    assert (
        second["input_tokens"] + second["cache_read_input_tokens"]
        == first["input_tokens"]
        == thinker.client.post(
            f"{PATH}/count_tokens",
            json={"model": MODEL, "messages": USER, "system": system}
            | {"thinking": {"type": "disabled"}},
        ).json()["input_tokens"]
    )


def test_a_stream_that_breaks_ends_with_an_error_in_its_envelope(slow_gateway: Gateway) -> None:
    """The deadline passes while the answer is written."""
    asked = {"model": THOUGHTLESS, "max_tokens": 8000, "stream": True}
    asked |= {"messages": [{"role": "user", "content": "x"}]}
    reply = begun_before_its_deadline(slow_gateway, {}, PATH, asked)
    assert reply.headers["request-id"]
    last = [json.loads(each[6:]) for each in reply.iter_lines() if each[:5] == "data:"][-1]
    assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")
    assert last["request_id"] == reply.headers["request-id"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is null; allowed: a whole number, at least 1"),
    ({"temperature": 1.5}, "temperature is 1.5; allowed: a number, 0…1"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages is []; allowed: a list of at least one message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'; allowed: user"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is []; allowed: "),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type is 'image'; allowed: text or tool_result",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        "messages[0].content[0].type is 'server_tool_use'; allowed: text, thinking",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "messages[0].content[0].tool_use_id is missing; allowed: the id of a call",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type is 'image'; allowed: text"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'; allowed: 1 to 64"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "w"}, TIME, TIME]},
        "tools[2].name is 'time'; allowed: names that differ",
    ),
    ({"tools": [TIME | {"type": "bash_20250124"}]}, "tools[0].type is 'bash_20250124'; allowed: "),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any'; allowed: auto or none, without"),
    (
        {"tools": [TIME], "tool_choice": {"type": "tool", "name": "f"}},
        "tool_choice.name is 'f'; allowed: one of ['time']",
    ),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported: this version calls no"),
    ({"stop": ["x"]}, "stop is not supported: here it is `stop_sequences`"),
    ({"seed": 1}, "seed is not supported: it is a field of /v1/chat/completions"),
]


@pytest.mark.parametrize(("more", "sentence"), REFUSED, ids=[each[1][:40] for each in REFUSED])
def test_what_cannot_be_served_is_refused_by_its_name(
    thinker: Gateway, more: dict[str, Any], sentence: str
) -> None:
    status, kind, message = refused(thinker.client.post(PATH, json=body(**more)))
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith(sentence)


def test_a_model_without_thoughts_answers_an_agent_that_asks_for_some(gateway: Gateway) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = body(model=THOUGHTLESS, thinking=thinking, tools=[TIME])
    reply = gateway.client.post(PATH, json=asked)
    assert reply.status_code == 200, reply.text
    assert [block["type"] for block in reply.json()["content"]] == ["text"]


def test_what_agents_send_beside_is_served_and_named_in_the_log(thinker: Gateway) -> None:
    more = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "tools": [TIME | {"eager_input_streaming": True}, {"type": "web_search_20250305"}],
        "tool_choice": {"type": "auto"},
    }
    headers = {"anthropic-version": "2026-10-21", "anthropic-beta": "interleaved-9,fine-grained-9"}
    reply = thinker.client.post(f"{PATH}?beta=true", json=body(**more), headers=headers)
    assert reply.status_code == 200, reply.text
    for named in (
        "context_management",
        "tools[0].eager_input_streaming",
        "interleaved-9",
        "fine-grained-9",
        "web_search_20250305",
    ):
        thinker.wait_until(lambda named=named: thinker.stage.says(f'"{named}"'))  # type: ignore[misc]


def test_the_context_is_refused_in_words_that_agents_read(thinker: Gateway) -> None:
    long = [{"role": "user", "content": "river " * 9000}]
    _, _, message = refused(thinker.client.post(PATH, json=body(messages=long)))
    assert message.startswith("prompt is too long: 90")
    assert message.endswith(" tokens > 8192 maximum")
    _, _, message = refused(thinker.client.post(PATH, json=body(max_tokens=8190)))
    assert message.startswith("input length and `max_tokens` exceed context limit: ")
    assert " + 8190 > 8192, decrease input length or `max_tokens`" in message


def test_paths_methods_models_and_versions_are_refused_in_the_same_envelope(
    thinker: Gateway,
) -> None:
    client = thinker.client
    assert refused(client.get(PATH))[:2] == (405, "invalid_request_error")
    assert refused(client.post(f"{PATH}/batches", json={}))[:2] == (404, "not_found_error")
    unknown = refused(client.post(PATH, json=body(model="claude")))
    assert unknown[:2] == (404, "not_found_error")
    assert "'claude'" in unknown[2]
    old = client.post(PATH, json=body(), headers={"anthropic-version": "2023-01-01"})
    allowed = "2023-06-01 or 2026-10-21"
    assert refused(old)[2] == f"anthropic-version is '2023-01-01'; allowed: {allowed}"
    form = client.post(PATH, content=b"a=1", headers={"content-type": "text/plain"})
    assert refused(form)[:2] == (415, "invalid_request_error")
    assert refused(client.post(PATH, content=b"{", headers={"content-type": "application/json"}))[
        2
    ].startswith("the body is not valid JSON")


def test_counting_refuses_what_answering_would(thinker: Gateway) -> None:
    asked = {"model": MODEL, "messages": USER, "tools": [TIME | {"name": "a b"}]}
    reply = thinker.client.post(f"{PATH}/count_tokens", json=asked)
    assert refused(reply)[2].startswith("tools[0].name is 'a b'; allowed: 1 to 64")


def test_models_are_listed_in_the_form_of_the_api_that_asks(thinker: Gateway) -> None:
    headers = {"anthropic-version": "2023-06-01"}

    def page(status: int = 200, **query: Any) -> dict[str, Any]:
        reply = thinker.client.get("/v1/models", headers=headers, params=query)
        assert reply.status_code == status, reply.text
        listed: dict[str, Any] = reply.json()
        return listed

    cards = {card["id"]: card for card in thinker.client.get("/v1/models").json()["data"]}
    ids = [*cards]
    assert ids
    listed = page()
    assert [each["id"] for each in listed["data"]] == ids
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (ids[0], ids[-1], False)
    one = thinker.client.get(f"/v1/models/{MODEL}", headers=headers).json()
    assert one in listed["data"]
    created = datetime.fromisoformat(one.pop("created_at"))
    assert (created.timestamp(), created.tzinfo) == (cards[MODEL]["created"], UTC)
    assert one == {
        "type": "model",
        "id": MODEL,
        "display_name": MODEL,
        "lifecycle": "active",
        "max_input_tokens": cards[MODEL]["max_model_len"],
        "max_tokens": cards[MODEL]["max_model_len"],
    }


def test_models_come_in_pages_before_and_behind_one() -> None:
    cards = [{"id": name, "created": 0, "max_model_len": 8} for name in "abcd"]

    def page(**query: str) -> tuple[str, bool]:
        listed = page_of_models(query, cards)
        return "".join(each["id"] for each in listed["data"]), listed["has_more"]

    assert page(limit="3") == ("abc", True)
    assert page(limit="3", after_id="c") == ("d", False)
    assert page(limit="2", before_id="d") == ("bc", True)
    assert page(after_id="d") == ("", False)
    for name, value in (("limit", "0"), ("limit", "1001"), ("limit", "x"), ("before_id", "z")):
        with pytest.raises(BadRequest, match=f"^{name} is '{value}'; allowed: "):
            page(**{name: value})
