"""What REST refuses: status, envelope and the name of the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.bad_sampling import SAMPLING, SAMPLING_IDS, VOCAB_SIZE, schema_format
from tests.gateway.processes import MODEL, Gateway, chat_body, completion_body

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ACCEPTED: list[dict[str, Any]] = [
    {"n": 128, "temperature": 1, "max_tokens": 1},
    {"temperature": 2},
    {"top_p": 1, "top_k": -1},
    {"top_k": 0, "min_p": 1},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"repetition_penalty": 0.01},
    {"stop": [str(i) * 9 for i in range(16)]},
    {"logit_bias": {str(VOCAB_SIZE - 1): -1000}},
    {"min_tokens": 8},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"best_of": 1},
    {"best_of": 3, "n": 2, "temperature": 1},
    {"use_beam_search": True, "n": 2},
    {"truncate_prompt_tokens": 1},
    {"logprobs": True, "top_logprobs": 20},
    {"prompt_logprobs": 20},
    {"speculative": "auto"},
    {"speculative": {}},
    {"speculative": {"mode": "auto", "drafter": "suffix", "max_tokens": 31}},
    {"speculative": {"mode": None, "drafter": "ngram", "max_tokens": 1}},
]

ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "g"}}]},
}
# What only JSON can get wrong; the path, what is changed in a good body (None: taken out), status
# and field.
JSON_ROWS: list[tuple[str, dict[str, Any], int, str | None]] = [
    (CHAT, {"model": None}, 400, "model"),
    (CHAT, {"model": "nobody"}, 404, "model"),
    (CHAT, {"model": 5}, 400, "model"),
    (CHAT, {"messages": None}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
    (CHAT, {"messages": [5]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]},
        400,
        "messages[0].function_call.name",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]},
        400,
        "messages[0].audio",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "prefix": True}]},
        400,
        "messages[0].prefix",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 9000}]}, 400, "messages"),
    (CHAT, {"temperature": "hot"}, 400, "temperature"),
    (CHAT, {"temperature": True}, 400, "temperature"),
    (CHAT, {"max_tokens": 1.5}, 400, "max_tokens"),
    (CHAT, {"max_tokens": -1}, 400, "max_tokens"),
    (CHAT, {"max_tokens": "8"}, 400, "max_tokens"),
    (CHAT, {"n": "2"}, 400, "n"),
    (CHAT, {"seed": 2**63}, 400, "seed"),
    (CHAT, {"seed": "x"}, 400, "seed"),
    (CHAT, {"stop": 5}, 400, "stop"),
    (CHAT, {"stop": [5]}, 400, "stop[0]"),
    (CHAT, {"logit_bias": {"x": 1}}, 400, "logit_bias"),
    (CHAT, {"logit_bias": [1]}, 400, "logit_bias"),
    (CHAT, {"stream": "yes"}, 400, "stream"),
    (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    (CHAT, {"use_beam_search": True, "n": 11}, 400, "use_beam_search"),
    (CHAT, {"stream": True, "best_of": 2, "temperature": 1}, 400, "best_of"),
    (
        COMPLETIONS,
        {"stream": True, "best_of": 2, "temperature": 1, "echo": True, "logprobs": 1},
        400,
        "best_of",
    ),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    (CHAT, {"cache_salt": 5}, 400, "cache_salt"),
    (CHAT, {"priority": -1}, 400, "priority"),
    (CHAT, {"tools": []}, 400, "tools"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    (CHAT, {"tools": [{"function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
    (
        CHAT,
        {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
        400,
        "tools[0].function.parameters",
    ),
    (CHAT, {"tools": [{"type": "web_search", "function": {"name": "f"}}]}, 400, "tools[0].type"),
    (CHAT, {"tools": [{"function": {"name": "f"}}], "tool_choice": "g"}, 400, "tool_choice"),
    (
        CHAT,
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"function": {"name": "g"}}},
        400,
        "tool_choice",
    ),
    (
        CHAT,
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"name": "g"}},
        400,
        "tool_choice.function",
    ),
    (
        CHAT,
        {
            "tools": [{"function": {"name": "f"}}],
            "tool_choice": ALLOWED | {"allowed_tools": {"mode": "any"}},
        },
        400,
        "tool_choice.allowed_tools.mode",
    ),
    (CHAT, {"tools": [{"function": {"name": "f"}}], "tool_choice": ALLOWED}, 400, "tool_choice"),
    (
        CHAT,
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "allowed_tools"}},
        400,
        "tool_choice.allowed_tools",
    ),
    (CHAT, {"tool_choice": "auto"}, 400, "tool_choice"),
    (CHAT, {"functions": []}, 400, "functions"),
    (CHAT, {"functions": [{"name": "a b"}]}, 400, "functions[0].name"),
    (
        CHAT,
        {"functions": [{"name": "f", "parameters": {"type": "array"}}]},
        400,
        "functions[0].parameters",
    ),
    (CHAT, {"functions": [{"name": "f"}], "function_call": "required"}, 400, "function_call"),
    (CHAT, {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, 400, "function_call"),
    (CHAT, {"functions": [{"name": "f"}], "tools": [{"function": {"name": "f"}}]}, 400, "tools"),
    (CHAT, {"functions": [{"name": "f"}], "tool_choice": "auto"}, 400, "tool_choice"),
    (CHAT, {"function_call": "auto"}, 400, "function_call"),
    (COMPLETIONS, {"functions": [{"name": "f"}]}, 400, "functions"),
    (CHAT, {"reasoning_effort": "some"}, 400, "reasoning_effort"),
    (CHAT, {"verbosity": "loud"}, 400, "verbosity"),
    (COMPLETIONS, {"verbosity": "low"}, 400, "verbosity"),
    (CHAT, {"thinking_token_budget": 8}, 400, "thinking_token_budget"),
    (CHAT, {"thinking_token_budget": -2}, 400, "thinking_token_budget"),
    (CHAT, {"truncation_side": "middle"}, 400, "truncation_side"),
    (CHAT, {"speculative": "on"}, 400, "speculative"),
    (CHAT, {"speculative": True}, 400, "speculative"),
    (CHAT, {"speculative": ["off"]}, 400, "speculative"),
    (CHAT, {"speculative": {"mode": 1}}, 400, "speculative.mode"),
    (CHAT, {"speculative": {"drafter": ["ngram"]}}, 400, "speculative.drafter"),
    (CHAT, {"speculative": {"max_tokens": "4"}}, 400, "speculative.max_tokens"),
    (CHAT, {"speculative": {"max_tokens": 1.5}}, 400, "speculative.max_tokens"),
    (CHAT, {"speculative": {"max_tokens": -1}}, 400, "speculative.max_tokens"),
    (
        CHAT,
        {"speculative": {"num_speculative_tokens": 5}},
        400,
        "speculative.num_speculative_tokens",
    ),
    (COMPLETIONS, {"speculative": {"draft": "ngram"}}, 400, "speculative.draft"),
    (COMPLETIONS, {"speculative": {"max_tokens": 32}}, 400, "speculative.max_tokens"),
    (CHAT, {"documents": [{"title": "t", "text": "x"}]}, 400, "documents"),
    (CHAT, {"suffix": "x"}, 400, "suffix"),
    # No token would be left; passed over, it would mean all of them.
    (CHAT, {"allowed_token_ids": []}, 400, "allowed_token_ids"),
    (COMPLETIONS, {"allowed_token_ids": []}, 400, "allowed_token_ids"),
    (CHAT, {"modalities": ["text", "audio"]}, 400, "modalities"),
    (CHAT, {"separate_reasoning": False}, 400, "separate_reasoning"),
    (CHAT, {"vllm_xargs": {"a": 1}}, 400, "vllm_xargs"),
    (CHAT, {"logprob_token_ids": [1]}, 400, "logprob_token_ids"),
    (CHAT, {"repetition_detection": {"max_pattern_size": 4}}, 400, "repetition_detection"),
    (CHAT, {"prompt": "x"}, 400, "prompt"),
    (CHAT, {"regex": "a", "ebnf": 'root ::= "a"'}, 400, "ebnf"),
    (COMPLETIONS, {"messages": [{"role": "user", "content": "x"}]}, 400, "messages"),
    (COMPLETIONS, {"tools": [{"function": {"name": "f"}}]}, 400, "tools"),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}, 400, "prompt_embeds"),
    (CHAT, {"response_format": "json"}, 400, "response_format"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        400,
        "response_format.json_schema.schema",
    ),
    (
        CHAT,
        {"response_format": schema_format({"not": {}})},
        400,
        "response_format.json_schema.schema",
    ),
    (
        CHAT,
        {"response_format": schema_format({"type": "strin"})},
        400,
        "response_format.json_schema.schema",
    ),
    (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, 400, "guided_regex"),
    (CHAT, {"guided_regex": "(a"}, 400, "guided_regex"),
    (CHAT, {"guided_choice": []}, 400, "guided_choice"),
    (CHAT, {"guided_choice": "a"}, 400, "guided_choice"),
    (CHAT, {"guided_regex": "a", "ignore_eos": True}, 400, "ignore_eos"),
    (CHAT, {"guided_regex": "a", "guided_whitespace_pattern": " "}, 400, "whitespace_pattern"),
    (
        COMPLETIONS,
        {"structured_outputs": {"grammar": "start: a"}},
        400,
        "structured_outputs.grammar",
    ),
    (COMPLETIONS, {"structured_outputs": {"json": "{"}}, 400, "structured_outputs.json"),
    (
        COMPLETIONS,
        {"structured_outputs": {"json": {}, "regex": "a"}},
        400,
        "structured_outputs.regex",
    ),
    (COMPLETIONS, {"structured_outputs": {}}, 400, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"magic": 1}}, 400, "structured_outputs.magic"),
    (COMPLETIONS, {"structural_tag": {"format": {"type": "x"}}}, 400, "structural_tag"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": "x"}, 400, "chat_template_kwargs"),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
    ),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[1], ["a"]]}, 400, "prompt[1][0]"),
    (COMPLETIONS, {"prompt": [[1], []]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt[0]"),
    (COMPLETIONS, {"prompt": [1] * 8192}, 400, "prompt"),
    (COMPLETIONS, {"logprobs": 21}, 400, "logprobs"),
    (COMPLETIONS, {"suffix": "end"}, 400, "suffix"),
    (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
    ("/tokenize", {"prompt": None}, 400, "prompt"),
    ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "tokens"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens"),
]
GOOD = {
    CHAT: chat_body(),
    COMPLETIONS: completion_body(),
    "/tokenize": {"model": MODEL, "prompt": "a"},
    "/detokenize": {"model": MODEL, "tokens": [5]},
}
TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error"}


def check(reply: Any, status: int, param: str | None) -> str:
    """Of an envelope; returns its message."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == TYPES.get(status, "invalid_request_error")
    assert error["param"] == param
    assert error["code"]
    assert " at 0x" not in error["message"]
    assert "Traceback" not in error["message"]
    message: str = error["message"]
    return message


@pytest.mark.parametrize(("name", "value", "param"), SAMPLING, ids=SAMPLING_IDS)
def test_rest_refuses_what_the_sampling_contract_refuses(
    gateway: Gateway, name: str, value: Any, param: str
) -> None:
    message = check(gateway.client.post(CHAT, json=chat_body(**{name: value})), 400, param)
    assert "allowed" in message or "not supported" in message
    if name != "top_logprobs":
        body = completion_body(**{name: value})
        check(
            gateway.client.post(COMPLETIONS, json=body),
            400,
            "prompt" if param == "messages" else param,
        )


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_rest_accepts_what_lies_just_inside(gateway: Gateway, fields: dict[str, Any]) -> None:
    reply = gateway.client.post(CHAT, json=chat_body(**fields))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("path", "change", "status", "param"),
    JSON_ROWS,
    ids=[f"{row[0]} {str(row[1])[:40]}" for row in JSON_ROWS],
)
def test_rest_names_the_field_of_a_bad_body(
    gateway: Gateway, path: str, change: dict[str, Any], status: int, param: str | None
) -> None:
    body = {name: value for name, value in (GOOD[path] | change).items() if value is not None}
    check(gateway.client.post(path, json=body), status, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{'a': 1}", b'{"model": NaN}', b"\xff\xfe", b"[" * 3000, b"[]", b'"x"', b"null"],
)
def test_rest_refuses_what_is_no_json_object(gateway: Gateway, body: bytes) -> None:
    reply = gateway.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    check(reply, 400, None)


def test_rest_names_the_text_that_is_not_whole(gateway: Gateway) -> None:
    cases = [
        (
            rb'"messages": [{"role": "user", "content": "a\ud800b"}]',
            "messages[0].content",
            r"'a\ud800b'",
        ),
        (rb'"metadata": {"\udc00": "x"}', r"metadata.\udc00", r"'\udc00'"),
    ]
    for fields, param, shown in cases:
        body = b'{"model": "m", ' + fields + b"}"
        said = check(
            gateway.client.post(CHAT, content=body, headers={"content-type": "application/json"}),
            400,
            param,
        )
        assert said == rf"{param} is {shown}; allowed: text whose \ud800…\udfff come in pairs"


SENTENCES = [
    (CHAT, {"model": None}, "model is null; allowed: a served model's name"),
    (CHAT, {"temperature": True}, "temperature is true; allowed: a number, 0…2"),
    (CHAT, {"max_tokens": 0}, "max_tokens is 0; allowed: at least 1"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens is 0; allowed: at least 1, or 0 with echo"),
    (
        CHAT,
        {"top_k": 2**40},
        "top_k is 1099511627776; allowed: a whole number of 32 bits: −1, 0 or at least 1",
    ),
    ("/tokenize", {"prompt": None}, "prompt is missing; allowed: text, or messages in its place"),
]


@pytest.mark.parametrize(
    ("path", "change", "sentence"), SENTENCES, ids=[row[2] for row in SENTENCES]
)
def test_rest_shows_values_as_json_has_them_and_names_what_is_missing(
    gateway: Gateway, path: str, change: dict[str, Any], sentence: str
) -> None:
    reply = gateway.client.post(path, json=GOOD[path] | change)
    assert check(reply, 400, sentence.partition(" ")[0]) == sentence


def test_rest_says_that_a_message_without_parts_has_none(gateway: Gateway) -> None:
    reply = gateway.client.post(CHAT, json=chat_body(messages=[{"role": "user", "content": []}]))
    said = check(reply, 400, "messages[0].content")
    assert (
        said == "messages[0].content is missing or has no parts; allowed: a string or a list of "
        "text parts"
    )


def test_rest_refuses_other_media_types_methods_and_paths(gateway: Gateway) -> None:
    check(
        gateway.client.post(CHAT, content=b"a=b", headers={"content-type": "text/plain"}), 415, None
    )
    check(gateway.client.get(CHAT), 405, None)
    check(gateway.client.post("/v1/audio", json={}), 404, "path")
    check(gateway.client.get("/v1/models/nobody"), 404, "model")


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_an_endpoint_that_is_not_there_is_no_id_of_another_one(
    gateway: Gateway, method: str
) -> None:
    path = "/v1/responses/compact"
    said = check(gateway.client.request(method, path), 404, "path")
    assert (
        said == f"the path '{path}' does not exist; `truncation` of /v1/responses leaves out the "
        "oldest turns"
    )


def test_an_unknown_model_is_refused_with_the_names_of_served_ones(gateway: Gateway) -> None:
    reported = f"the model 'nobody' does not exist; served: {MODEL}"
    for path, body in (*GOOD.items(), ("/v1/responses", {"input": "x"})):
        assert (
            check(gateway.client.post(path, json=body | {"model": "nobody"}), 404, "model")
            == reported
        )
    assert check(gateway.client.get("/v1/models/nobody"), 404, "model") == reported
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for call, request in (
            (stub.Chat, inference_pb2.ChatRequest(model="nobody")),
            (
                stub.Embed,
                inference_pb2.EmbedRequest(model="nobody", inputs=[processor_pb2.Prompt(text="x")]),
            ),
            (stub.Detokenize, inference_pb2.DetokenizeRequest(model="nobody")),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                call(request)
            assert raised.value.details() == reported


def test_rest_refuses_a_body_of_ten_megabytes_declared_or_not(gateway: Gateway) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(160):
            yield b" " * 65536

    huge = b" " * (10 << 20)
    check(
        gateway.client.post(CHAT, content=huge, headers={"content-type": "application/json"}),
        413,
        None,
    )
    check(
        gateway.client.post(CHAT, content=chunks(), headers={"content-type": "application/json"}),
        413,
        None,
    )


@pytest.mark.parametrize("header", ["x-priority", "x-headwater-deadline-ms"])
@pytest.mark.parametrize("value", ["-1", "high", "1e3", "99999999999"])
def test_rest_names_a_bad_header(gateway: Gateway, header: str, value: str) -> None:
    check(gateway.client.post(CHAT, json=chat_body(), headers={header: value}), 400, header)


def test_rest_refuses_a_tenant_name_that_is_none(gateway: Gateway) -> None:
    check(gateway.client.post(CHAT, json=chat_body(), headers={"x-tenant": "a b"}), 400, "x-tenant")
