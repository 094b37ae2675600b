"""Responses over the whole line, with the official client and on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headwater.gateway.http.response_turns import MAX_READ_RESPONSES
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway

PATH = "/v1/responses"
ASKED: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def keeper(
    behind: Behind, start_gateway: GatewayStarter, shared_redis_url: str
) -> Iterator[Gateway]:
    """A gateway that keeps responses."""
    with start_gateway(behind, f"--redis-url={shared_redis_url}", "--response-ttl=60") as running:
        yield running


@pytest.fixture(scope="module")
def client(keeper: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keeper.rest}/v1", api_key="any", max_retries=0) as official:
        yield official


def post(gateway: Gateway, status: int = 200, /, **body: Any) -> dict[str, Any]:
    reply = gateway.client.post(PATH, json=ASKED | body)
    assert reply.status_code == status, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_a_response_streams_the_events_of_the_answer_that_comes_whole(
    client: openai.OpenAI,
) -> None:
    whole = client.responses.create(**ASKED, input="Name three rivers.")
    events = list(client.responses.create(**ASKED, input="Name three rivers.", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final: Any = events[-1]
    assert text == whole.output_text == final.response.output_text
    assert whole.usage is not None
    assert (whole.status, whole.incomplete_details) == (
        "incomplete",
        final.response.incomplete_details,
    )
    assert (whole.usage.output_tokens, final.response.usage.output_tokens) == (12, 12)
    assert whole.usage.total_tokens == whole.usage.input_tokens + 12


def test_a_turn_goes_on_where_the_one_before_ended(client: openai.OpenAI, keeper: Gateway) -> None:
    first = client.responses.create(**ASKED, input="Name a river.")
    second = client.responses.create(**ASKED, input="And another?", previous_response_id=first.id)
    spelled = [
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": [{"type": "input_text", "text": "And another?"}]},
    ]
    same = client.responses.create(**ASKED, input=spelled, store=False)
    assert second.output_text == same.output_text
    assert second.usage is not None
    assert same.usage is not None
    assert second.usage.input_tokens == same.usage.input_tokens
    assert second.previous_response_id == first.id
    third = client.responses.create(
        **ASKED, input="More.", previous_response_id=second.id, instructions="Be brief."
    )
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_items_of_kept_responses_are_named_by_their_ids(
    client: openai.OpenAI, keeper: Gateway
) -> None:
    """Vercel's SDK sends what the model wrote by reference."""

    def reference(response: Any) -> dict[str, Any]:
        return {"type": "item_reference", "id": response.output[0].id}

    brief = {"max_output_tokens": 2}
    user: Any = [{"role": "user", "content": text} for text in ("Name a river.", "Another?", "So?")]
    first = client.responses.create(**ASKED | brief, input=user[:1])
    turn: Any = [user[0], reference(first), user[1]]
    second = client.responses.create(**ASKED | brief, input=turn)
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert listed[1].id == first.output[0].id
    client.responses.delete(first.id)
    turn += [reference(second), user[2]]
    third = client.responses.create(**ASKED | brief, input=turn, stream=True)
    spelled: Any = [user[0], first.output[0], user[1], second.output[0], user[2]]
    same = client.responses.create(**ASKED | brief, input=spelled, store=False)
    final: Any = list(third)[-1]
    assert final.response.output_text == same.output_text
    assert client.responses.input_tokens.count(model=MODEL, input=turn).input_tokens == (
        final.response.usage.input_tokens
    )

    for item_id in (first.output[0].id, "msg_1", None):
        lost: Any = [{"type": "item_reference", "id": item_id}]
        error = post(keeper, 400, input=lost)["error"]
        assert error["param"] == "input[0].id"
        assert error["message"].endswith("allowed: the id of an item of a response that is kept")
    assert post(keeper, 400, input=turn + turn)["error"]["param"] == "input[6].id"
    apart: Any = [
        reference(client.responses.create(**ASKED | brief, input=user[:1]))
        for _ in range(MAX_READ_RESPONSES + 1)
    ]
    error = post(keeper, 400, input=apart)["error"]
    assert (error["param"], error["message"][-35:]) == (
        "input[0].id",
        "one conversation, or of 4 responses",
    )


def test_a_response_is_kept_until_it_is_deleted(client: openai.OpenAI, keeper: Gateway) -> None:
    made = client.responses.create(**ASKED, input="Name a river.", metadata={"a": "b"})
    assert client.responses.retrieve(made.id) == made
    [item] = client.responses.input_items.list(made.id)
    assert item.model_dump()["content"][0]["text"] == "Name a river."
    assert keeper.client.get(f"{PATH}/{made.id}", headers={"x-tenant": "other"}).status_code == 404
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASKED, input="x", previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"


def test_the_input_of_a_turn_is_listed_in_pages(client: openai.OpenAI, keeper: Gateway) -> None:
    # The client chose the id of two items.
    sent: Any = [
        {"role": "user", "content": f"{i}", "id": "mine" if i in (1, 2) else None}
        for i in range(25)
    ]
    path = f"{PATH}/{client.responses.create(**ASKED, input=sent).id}/input_items"

    def page(**query: Any) -> tuple[list[int], bool]:
        listed = keeper.client.get(path, params=query).json()
        assert (listed["first_id"], listed["last_id"]) == (
            listed["data"][0]["id"],
            listed["data"][-1]["id"],
        )
        return [int(item["content"][0]["text"]) for item in listed["data"]], listed["has_more"]

    assert page() == (list(range(24, 4, -1)), True)
    assert page(order="asc", limit=2) == ([0, 1], True)
    assert page(order="asc", limit=2, after="mine") == ([3, 4], True)
    assert page(after="mine") == ([0], False)
    for name, value in (("limit", "0"), ("order", "up"), ("after", "none")):
        refused = keeper.client.get(path, params={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_response_is_not_read_with_parameters_that_have_no_effect(keeper: Gateway) -> None:
    path = f"{PATH}/{post(keeper, input='x')['id']}"
    for query, param, message in (
        ("stream=x", "stream", "stream is 'x'; allowed: true or false"),
        (
            "starting_after=4",
            "starting_after",
            "starting_after without stream; allowed: with stream=true",
        ),
        (
            "stream=false&starting_after=x",
            "starting_after",
            "starting_after without stream; allowed: with stream=true",
        ),
    ):
        refused = keeper.client.get(f"{path}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert refused.json()["error"]["message"] == message
    assert keeper.client.get(f"{path}?stream=False").status_code == 200


def test_a_response_that_is_not_to_be_kept_is_not_kept(keeper: Gateway) -> None:
    made = post(keeper, input="x", store=False)
    assert made["store"] is False
    assert keeper.client.get(f"{PATH}/{made['id']}").status_code == 404


@pytest.mark.parametrize("store", [True, False, None])
def test_every_event_of_a_stream_says_whether_the_response_is_kept(
    client: openai.OpenAI, store: bool | None
) -> None:
    kept = {} if store is None else {"store": store}
    events: list[Any] = list(client.responses.create(**ASKED | kept, input="x", stream=True))
    sent = {event.type: event.response.store for event in events if hasattr(event, "response")}
    is_kept = store is not False
    kinds = ("response.created", "response.in_progress", "response.incomplete")
    assert sent == dict.fromkeys(kinds, is_kept)


def test_a_gateway_without_a_store_answers_and_says_that_nothing_was_kept(gateway: Gateway) -> None:
    assert post(gateway, input="x")["store"] is False
    assert (
        post(gateway, 503, input="x", previous_response_id="resp_1")["error"]["code"]
        == "store_unavailable"
    )


def test_calls_and_their_results_of_the_past_are_part_of_the_prompt(keeper: Gateway) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "Hm."}],
    }
    user = {"role": "user", "content": "What time is it?"}
    tokens = [
        post(keeper, input=items, store=False)["usage"]["input_tokens"]
        for items in ([user], [user, call], [user, thought, call, result])
    ]
    assert tokens == sorted(set(tokens))


def test_logprobs_come_when_asked_for(keeper: Gateway) -> None:
    made = post(keeper, input="x", include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = made["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_if_it_may(gateway: Gateway) -> None:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 2000}
        for i in range(6)
    ]
    asked = [
        {"role": "system", "content": "Be brief."},
        *turns,
        {"role": "user", "content": "And now?"},
    ]
    assert post(gateway, 400, input=asked)["error"]["code"] == "context_length_exceeded"
    usage = post(gateway, input=asked, truncation="auto")["usage"]
    assert 6000 < usage["input_tokens"] <= 8192 - 12
    alone = [{"role": "user", "content": "word " * 9000}]
    assert (
        post(gateway, 400, input=alone, truncation="auto")["error"]["code"]
        == "context_length_exceeded"
    )


def test_turns_of_a_conversation_go_on_from_what_it_holds(
    client: openai.OpenAI, keeper: Gateway
) -> None:
    user: Any = {"type": "message", "role": "user", "content": "Name a river."}
    conversation = client.conversations.create(metadata={"a": "b"}, items=[user])
    first = client.responses.create(**ASKED, input="A long one.", conversation=conversation.id)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    events = client.responses.create(
        **ASKED, input="And another?", conversation={"id": conversation.id}, stream=True
    )
    second: Any = list(events)[-1]
    sent = [user, {"role": "user", "content": "A long one."}]
    spelled: Any = [
        *sent,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And another?"},
    ]
    assert (
        client.responses.create(**ASKED, input=spelled, store=False).output_text
        == second.response.output_text
    )
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == [
        "Name a river.",
        "A long one.",
        first.output_text,
        "And another?",
        second.response.output_text,
    ]
    assert len({item.id for item in items}) == 5


def test_conversations_are_read_changed_and_forgotten(
    client: openai.OpenAI, keeper: Gateway
) -> None:
    made = client.conversations.create()
    assert client.conversations.update(made.id, metadata={"k": "v"}).metadata == {"k": "v"}
    assert client.conversations.retrieve(made.id).created_at == made.created_at
    items: Any = [{"role": "user", "content": f"{i}"} for i in range(3)]
    added = client.conversations.items.create(made.id, items=items).data
    page = client.conversations.items.list(made.id, limit=2)
    assert ([item.id for item in page.data], page.has_more) == ([added[2].id, added[1].id], True)
    assert client.conversations.items.retrieve(added[1].id, conversation_id=made.id) == added[1]
    client.conversations.items.delete(added[1].id, conversation_id=made.id)
    assert [item.id for item in client.conversations.items.list(made.id).data] == [
        added[2].id,
        added[0].id,
    ]
    path = f"/v1/conversations/{made.id}"
    assert keeper.client.get(path, headers={"x-tenant": "other"}).status_code == 404
    refused = keeper.client.post(f"{path}/items", json={"items": [{"type": "compaction"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items[0].type")
    assert client.conversations.delete(made.id).deleted
    assert keeper.client.post(f"{path}/items", json={"items": items}).status_code == 404
    assert post(keeper, 404, input="x", conversation=made.id)["error"]["code"]


def test_a_conversation_takes_no_item_that_no_turn_can_go_on_from(keeper: Gateway) -> None:
    path = "/v1/conversations"
    made = keeper.client.post(path, json={"items": [{"role": "user", "content": "Hi"}]}).json()[
        "id"
    ]
    for item, param, sent in (
        (
            {"role": "zz", "content": "x"},
            "items[0].role",
            "items[0].role is 'zz'; allowed: system, developer, user",
        ),
        ({"content": "x"}, "items[0].role", "items[0].role is missing; allowed: "),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": ["x"]},
            "items[0].arguments",
            "items[0].arguments is ['x']; allowed: a string",
        ),
    ):
        for where in (path, f"{path}/{made}/items"):
            refused = keeper.client.post(where, json={"items": [item]})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["message"][: len(sent)]) == (
                400,
                param,
                sent,
            )
    assert post(keeper, input="So?", conversation=made)["status"] == "incomplete"


def test_errors_count_the_items_of_a_turn_without_those_before_it(keeper: Gateway) -> None:
    before = post(
        keeper,
        input=[{"role": "user", "content": f"{i}"} for i in range(3)],
        instructions="Be brief.",
    )
    sent = [{"role": "user", "content": "x"}, {"role": "zz", "content": "x"}]
    error = post(
        keeper, 400, input=sent, instructions="Be brief.", previous_response_id=before["id"]
    )["error"]
    assert (error["param"], error["message"][:22]) == ("input[1].role", "input[1].role is 'zz';")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": 5}, "input"),
    ({"input": "x", "model": None}, "model"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"type": "compaction"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": "x", "background": True, "store": False}, "store"),
    ({"input": "x", "conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
    ({"input": "x", "tools": [{"type": "telepathy"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "include": ["file_search_call.results"]}, "include[0]"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "temperature": 3}, "temperature"),
    ({"input": "x", "n": 2, "temperature": 1}, "n"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"input": "x", "stream_options": {}}, "stream_options"),
    ({"input": "x", "response_format": {"type": "json_object"}}, "response_format"),
    ({"input": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
]


def test_a_response_without_tokens_is_refused_without_naming_a_field_of_completions(
    gateway: Gateway,
) -> None:
    error = post(gateway, 400, input="x", max_output_tokens=0)["error"]
    assert error["message"] == "max_output_tokens is 0; allowed: at least 1"


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_by_name(
    gateway: Gateway, body: dict[str, Any], param: str, stream: bool
) -> None:
    if stream and "stream_options" in body:
        return
    error = post(gateway, 400, **body, stream=stream)["error"]
    assert error["param"] == param, error
