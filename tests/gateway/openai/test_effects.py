"""Each field of a chat that is not about sampling by what it does, over REST and over gRPC;
sampling is in `tests/line/test_line_conformance.py`.

A row asks twice, without and with the field, and looks at both answers.
"""
# ruff: noqa: E501 (a row is a line)

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from headwater.gateway.openai.schema import Answering, ChatCompletionRequest, Sampling
from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.processes import MODEL as PLAIN
from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import Gateway

USER: Any = [{"role": "user", "content": "What time is it in Ulm?"}]
BEGUN: Any = [*USER, {"role": "assistant", "content": "It is"}]
TIME: Any = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}}},
}
TIDE: Any = {
    "type": "function",
    "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}},
}
ONE_ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "tide"}}],
    },
}
GENERATION_PROMPT = "<|im_start|>assistant\n"
THINKING = {"chat_template_kwargs": {"opens_thoughts": True}, "thinking_token_budget": 6}


@dataclass(frozen=True)
class Told:
    """What a client was told."""

    prompt: str
    content: str
    reasoning: str
    calls: tuple[str, ...]
    num_reasoning_tokens: int
    has_receipt: bool
    has_ids: bool


class Rest:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def ask(self, body: dict[str, Any]) -> Told:
        headers = {"x-headwater-receipt": "1"} if body.pop("return_receipt", False) else {}
        has_ids = body.get("return_token_ids", True)
        asked = (
            {"model": MODEL, "messages": USER, "temperature": 0}
            | body
            | {"return_token_ids": has_ids}
        )
        reply = self._gateway.client.post("/v1/chat/completions", json=asked, headers=headers)
        assert reply.status_code == 200, reply.text
        whole = reply.json()
        [choice] = whole["choices"]
        message = choice["message"]
        return Told(
            prompt=self._text(whole["prompt_token_ids"]) if has_ids else "",
            content=message["content"] or "",
            reasoning=message.get("reasoning_content") or "",
            calls=tuple(call["function"]["name"] for call in message.get("tool_calls", ())),
            num_reasoning_tokens=whole["usage"]
            .get("completion_tokens_details", {})
            .get("reasoning_tokens", 0),
            has_receipt="receipt" in whole,
            has_ids="token_ids" in choice,
        )

    def _text(self, token_ids: list[int]) -> str:
        asked = {"model": MODEL, "tokens": token_ids}
        return str(self._gateway.client.post("/detokenize", json=asked).json()["prompt"])


class Grpc:
    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def ask(self, body: dict[str, Any]) -> Told:
        beside = {
            name: body.pop(name)
            for name in ("return_receipt", "return_token_ids", "priority")
            if name in body
        }
        sampling = {
            name: body.pop(name) for name in ("max_tokens", "thinking_token_budget") if name in body
        }
        asked = inference_pb2.ChatRequest(
            model=MODEL,
            conversation=_conversation(body),
            sampling=common_pb2.Sampling(temperature=0, **sampling),
            **({"return_token_ids": True} | beside),
        )
        reply = self._stub.Chat(asked, timeout=60)
        [choice] = reply.choices
        return Told(
            prompt=self._text(list(reply.prompt_token_ids)) if reply.prompt_token_ids else "",
            content=choice.message.content,
            reasoning=choice.message.reasoning_content,
            calls=tuple(call.name for call in choice.message.tool_calls),
            num_reasoning_tokens=reply.usage.reasoning_tokens,
            has_receipt=bool(reply.receipt_json),
            has_ids=bool(choice.token_ids),
        )

    def _text(self, token_ids: list[int]) -> str:
        return str(
            self._stub.Detokenize(
                inference_pb2.DetokenizeRequest(model=MODEL, token_ids=token_ids)
            ).text
        )


def _conversation(body: dict[str, Any]) -> processor_pb2.Conversation:
    """The same fields in the other surface's words."""
    fields = dict(body)
    choice = fields.pop("tool_choice", None)
    if isinstance(choice, dict):
        allowed = choice["allowed_tools"]
        fields["allowed_tools"] = [tool["function"]["name"] for tool in allowed["tools"]]
        choice = allowed["mode"]
    return processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(**message) for message in fields.pop("messages", USER)],
        tools=[
            common_pb2.Tool(
                name=tool["function"]["name"],
                parameters_json=json.dumps(tool["function"]["parameters"]),
            )
            for tool in fields.pop("tools", ())
        ],
        chat_template_kwargs_json=json.dumps(fields.pop("chat_template_kwargs", {})),
        tool_choice=choice,
        **fields,
    )


Effect = Callable[[Told, Told], bool]
SHORT = {"max_tokens": 4}
CALLING = {"tools": [TIME, TIDE], "reasoning_effort": "none", "max_tokens": 200}
# What both answers have, what only the second has, and what it does.
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], Effect]] = {
    "messages": (SHORT, {"messages": BEGUN}, lambda a, b: "It is" in b.prompt and "It is" not in a.prompt),
    "add_generation_prompt": (SHORT, {"add_generation_prompt": False}, lambda a, b: a.prompt == b.prompt + GENERATION_PROMPT),
    "continue_final_message": (
        SHORT | {"messages": BEGUN, "add_generation_prompt": False},
        {"continue_final_message": True},
        lambda a, b: b.prompt.endswith("It is") and a.prompt.endswith("<|im_end|>\n"),
    ),
    "echo": (
        SHORT | {"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True},
        {"echo": True},
        lambda a, b: b.content == "It is" + a.content,
    ),
    "chat_template_kwargs": (SHORT, {"chat_template_kwargs": {"opens_thoughts": True}}, lambda a, b: b.prompt == a.prompt + "<think>\n"),
    "reasoning_effort": (SHORT, {"reasoning_effort": "none"}, lambda a, b: b.prompt.endswith("</think>\n\n")),
    "verbosity": (SHORT, {"verbosity": "low"}, lambda a, b: "Verbosity: low" in b.prompt and "Verbosity" not in a.prompt),
    "include_reasoning": (
        THINKING | {"max_tokens": 12},
        {"include_reasoning": False},
        lambda a, b: bool(a.reasoning) and not b.reasoning and a.num_reasoning_tokens == b.num_reasoning_tokens > 0,
    ),
    "tools": (SHORT, {"tools": [TIME]}, lambda a, b: '"time"' in b.prompt and '"time"' not in a.prompt),
    "tool_choice": (CALLING, {"tool_choice": "none"}, lambda a, b: "Tools:" in a.prompt and "Tools:" not in b.prompt),
    "tool_choice required": (CALLING, {"tool_choice": "required", "parallel_tool_calls": False}, lambda a, b: len(b.calls) == 1),
    "tool_choice by name": (CALLING, {"tool_choice": "tide"}, lambda a, b: b.calls == ("tide",)),
    "parallel_tool_calls": (
        CALLING | {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        lambda a, b: len(b.calls) == 1 <= len(a.calls),
    ),
    "allowed_tools": (CALLING, {"tool_choice": ONE_ALLOWED}, lambda a, b: set(b.calls) == {"tide"}),
    "return_token_ids": (SHORT, {"return_token_ids": False}, lambda a, b: a.has_ids and not b.has_ids),
    "return_receipt": (SHORT, {"return_receipt": True}, lambda a, b: b.has_receipt and not a.has_receipt),
}  # fmt: skip


@pytest.fixture(scope="module", params=["rest", "grpc"])
def surface(request: pytest.FixtureRequest, thinker: Gateway) -> Iterator[Rest | Grpc]:
    if request.param == "rest":
        yield Rest(thinker)
        return
    with grpc.insecure_channel(thinker.grpc) as channel:
        yield Grpc(inference_pb2_grpc.InferenceStub(channel))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_does_what_it_says(name: str, surface: Rest | Grpc) -> None:
    both, more, effect = FIELDS[name]
    if name in REST_ALONE and isinstance(surface, Grpc):
        return
    if isinstance(surface, Rest) and more.get("tool_choice") == "tide":
        more = {"tool_choice": {"type": "function", "function": {"name": "tide"}}}
    without = surface.ask(dict(both))
    with_it = surface.ask(both | more)
    assert effect(without, with_it), (without, with_it)


ELSEWHERE = {
    "model": "test_bad_input.py",
    "priority": "test_admission.py",
    **dict.fromkeys(("session_id", "cache_ttl_seconds", "nvext", "hints"), "test_cache_hints.py"),
    "cache_salt": "test_line_conformance.py",
    "request_id": "test_line_conformance.py",
    "client_request_id": "test_line_conformance.py",
    "sampling": "test_line_conformance.py",
    "logprobs": "test_chat.py",
    "top_logprobs": "test_chat.py",
    "max_completion_tokens": "test_chat.py",
    "return_tokens_as_token_ids": "test_chat.py",
    "stream": "test_chat.py",
    "stream_options": "test_chat.py",
    "add_special_tokens": "test_processor.py",
    "tool_choice_is_name": "test_tools.py",
    "thoughts_are_optional": "anthropic/test_conversation.py",
    "resumable": "test_resume.py",
    "continuous_usage": "test_public_grpc.py",
    "response_format": "test_line_structured.py",
    "structured_outputs": "test_line_structured.py",
    "guided_json": "test_line_structured.py",
    "guided_regex": "test_line_structured.py",
    "guided_choice": "test_line_structured.py",
    "guided_grammar": "test_line_structured.py",
    "guided_whitespace_pattern": "test_line_structured.py",
    "guided_decoding_backend": "test_sent_bodies.py",
    "functions": "test_sent_bodies.py",
    "function_call": "test_sent_bodies.py",
    "structural_tag": "test_line_structured.py",
    "chat_template": "test_request_template.py",
    "documents": "test_bad_input.py",
    **dict.fromkeys(
        ("user", "metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key"),
        "without effect, below",
    ),
    "regex": "below",
    "ebnf": "below",
    "json_schema": "below",
    "no_stop_trim": "below",
}
REST_ALONE = ("echo",)


def test_every_field_of_a_chat_has_a_row() -> None:
    rest = {*ChatCompletionRequest.__struct_fields__, *Answering.__struct_fields__} - {
        *Sampling.__struct_fields__
    }
    messages = (inference_pb2.ChatRequest, processor_pb2.Conversation)
    fields = rest | {
        field.name.removesuffix("_json") for each in messages for field in each.DESCRIPTOR.fields
    }
    assert fields - {"conversation"} == {name.split()[0] for name in FIELDS} - {
        "return_receipt"
    } | {
        *ELSEWHERE,
        "return_receipt",
    }, "add a row to FIELDS here, or say in ELSEWHERE where the field is tested"


def test_fields_by_which_other_servers_know_the_same_are_served(thinker: Gateway) -> None:
    """Of vLLM's server and of SGLang's."""

    def sent(**fields: Any) -> Any:
        return Rest(thinker).ask({"max_tokens": 60, "reasoning_effort": "none"} | fields).content

    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert sent(regex="abc") == "abc"
    assert sent(ebnf='root ::= "x" "y"') == "xy"
    assert json.loads(sent(json_schema=json.dumps(schema))) == {"a": 1}
    assert sent(regex="abc", stop=["b"]) == "a"
    assert sent(regex="abc", stop=["b"], no_stop_trim=True) == "ab"
    assert (
        sent(
            structured_outputs={"regex": "abc", "disable_fallback": False}, thinking_token_budget=-1
        )
        == "abc"
    )
    asked = {
        "model": MODEL,
        "input": "x",
        "structured_outputs": {"regex": "abc"},
        "reasoning": {"effort": "none"},
    }
    answer = thinker.client.post("/v1/responses", json=asked).json()
    assert answer["output"][-1]["content"][0]["text"] == "abc"


def test_what_asks_for_nothing_is_accepted(thinker: Gateway) -> None:
    empty = {
        "modalities": ["text"],
        "vllm_xargs": {},
        "watermarking": None,
        "separate_reasoning": True,
        "lora_path": "",
    }
    others = {
        "session_id": "s",
        "stream_interval": 4,
        "spaces_between_special_tokens": True,
        "user": "u",
    }
    others |= {
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": True,
        "safety_identifier": "s",
    }
    others |= {"prompt_cache_key": "k"}
    assert Rest(thinker).ask({"max_tokens": 4} | empty | others).prompt


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(gateway: Gateway) -> None:
    long_text = "first " + "word " * 9000 + "last"
    asked = {
        "prompt": long_text,
        "max_tokens": 8,
        "return_token_ids": True,
        "truncate_prompt_tokens": -1,
    }
    kept = {
        side: gateway.complete(**asked, truncation_side=side)["choices"][0]["prompt_token_ids"]
        for side in ("left", "right")
    }
    assert {len(ids) for ids in kept.values()} == {8192 - 8}
    reported = {
        side: gateway.client.post("/detokenize", json={"model": PLAIN, "tokens": ids}).json()[
            "prompt"
        ]
        for side, ids in kept.items()
    }
    assert (reported["left"].split()[-1], reported["right"].split()[0]) == ("last", "first")


def test_probes_of_other_servers_are_answered(gateway: Gateway) -> None:
    assert [gateway.client.request(method, "/ping").status_code for method in ("GET", "POST")] == [
        200,
        200,
    ]
    assert gateway.client.get("/load").json() == {"server_load": 0}
