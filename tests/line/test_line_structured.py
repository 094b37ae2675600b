"""Structured output through a running cluster: every way to ask for it, seen by its effect."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import openai
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.proto.common_pb2 import ChatMessage, Sampling, StructuredOutput
from headwater.proto.processor_pb2 import Conversation
from tests.line.conftest import MODEL

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "code"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FUNCTION = {"begin": "<call>", "schema": PERSON, "end": "</call>"}
TAGS = {"type": "structural_tag", "structures": [FUNCTION], "triggers": ["<call>"]}
ONE_TAG = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": PERSON},
    "end": "</call>",
}


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_call(text: str) -> bool:
    return text.startswith("<call>") and text.endswith("</call>") and is_person(text[6:-7])


WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": PERSON, "strict": True},
            }
        },
        is_person,
    ),
    "response_format json_schema, not strict": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": PERSON},
            }
        },
        is_person,
    ),
    "structured_outputs json": ({"structured_outputs": {"json": PERSON}}, is_person),
    "structured_outputs json as text": (
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        is_person,
    ),
    "guided_json": ({"guided_json": PERSON}, is_person),
    "no whitespace": (
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        lambda text: (
            is_person(text)
            and text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        ),
    ),
    "guided_whitespace_pattern": (
        {"guided_json": PERSON, "guided_whitespace_pattern": ""},
        lambda text: (
            is_person(text)
            and text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        ),
    ),
    "guided_regex": (
        {"guided_regex": r"\d{3}-\d{4}"},
        lambda text: re.fullmatch(r"\d{3}-\d{4}", text),
    ),
    "structured_outputs regex": (
        {"structured_outputs": {"regex": "(ab)+c"}},
        lambda text: re.fullmatch("(ab)+c", text),
    ),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    "structured_outputs choice": (
        {"structured_outputs": {"choice": ["é", "日本"]}},
        lambda text: text in ("é", "日本"),
    ),
    "guided_grammar": (
        {"guided_grammar": 'start: sum\nsum: NUM ("+" NUM)~1..2\nNUM: /[0-9]{1,3}/'},
        lambda text: re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,2}", text),
    ),
    "GBNF": (
        {"structured_outputs": {"grammar": 'root ::= digit ("-" digit){1,2}\ndigit ::= [0-9]'}},
        lambda text: re.fullmatch(r"\d(-\d){1,2}", text),
    ),
    "structural tag": (
        {"response_format": {"type": "structural_tag", "format": ONE_TAG}},
        is_call,
    ),
    "text": ({"response_format": {"type": "text"}}, lambda text: True),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_matches_what_was_asked(way: str, simulated_line: Any) -> None:
    asked, matches = WAYS[way]
    body = {"max_tokens": 400, "temperature": 1, "seed": 3, "n": 2} | asked
    reply = simulated_line.chat([{"role": "user", "content": "Who?"}], **body)
    for choice in reply["choices"]:
        assert choice["finish_reason"] == ("length" if way == "text" else "stop")
        assert matches(choice["message"]["content"])


def test_the_examples_of_the_documentation_work(simulated_line: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text()
    examples = re.findall(r"curl http://localhost:8000(\S+) .*? -d '(.*?)'\n", text, re.DOTALL)
    assert len(examples) == 5
    for path, body in examples:
        reply = simulated_line.client.post(path, json=json.loads(body))
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_stream_concatenates_to_what_matches_and_completions_too(simulated_line: Any) -> None:
    body = {"max_tokens": 400, "temperature": 1, "seed": 5, "guided_json": PERSON}
    with simulated_line.stream("A person:", **body) as events:
        assert is_person("".join(event["choices"][0]["text"] for event in events))


def test_free_text_may_come_before_a_tag(simulated_line: Any) -> None:
    body = {"max_tokens": 40, "temperature": 1, "seed": 5, "response_format": TAGS}
    assert simulated_line.chat([{"role": "user", "content": "Who?"}], **body)["choices"][0][
        "message"
    ]["content"]


def test_grpc_takes_the_same(simulated_line: Any) -> None:
    request = inference_pb2.ChatRequest(
        model=MODEL,
        conversation=Conversation(messages=[ChatMessage(role="user", content="Who?")]),
        sampling=Sampling(
            max_tokens=400,
            seed=3,
            structured_output=StructuredOutput(json_schema=json.dumps(PERSON)),
        ),
    )
    with grpc.insecure_channel(simulated_line.record.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert is_person(stub.Chat(request).choices[0].message.content)
        request.sampling.structured_output.json_schema = '{"uniqueItems": true}'
        with pytest.raises(grpc.RpcError) as caught:
            stub.Chat(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "uses the keyword 'uniqueItems' at the top level" in caught.value.details()


@pytest.mark.long
def test_the_demo_model_answers_to_schemas_with_the_official_client(demo_line: Any) -> None:
    def ask(idx: int) -> str:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Invent person number {idx}. Answer in JSON."}],
            max_tokens=150,
            temperature=1,
            seed=idx,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": PERSON, "strict": True},
            },
        )
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].message.content or ""

    with (
        openai.OpenAI(base_url=f"{demo_line.record.rest}/v1", api_key="any") as client,
        ThreadPoolExecutor(6) as asking,
    ):
        assert all(map(is_person, asking.map(ask, range(6))))
