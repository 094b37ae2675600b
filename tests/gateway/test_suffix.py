"""A text behind a gap, on its way from each API to the processor. `tests/services/processor` shows
what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.gateway.ollama import decode as ollama
from headwater.gateway.ollama.schema import GenerateRequest
from headwater.gateway.ollama.to_pb import is_load, to_prompt
from headwater.gateway.openai.completions import CompletionRenderer
from headwater.gateway.openai.decode import decode
from headwater.gateway.openai.schema import CompletionRequest
from headwater.gateway.public_grpc.messages import prompt_of
from headwater.proto import common_pb2, inference_pb2
from headwater.proto.processor_pb2 import Prompt
from headwater.services.runtime.errors import BadRequest

GAP = Prompt(text="a", suffix="b")
CALLER: Any = None
"""Nobody: these functions do not look at who asks."""


def completions(**fields: Any) -> list[Prompt]:
    asked = decode(json.dumps({"model": "m"} | fields).encode(), CompletionRequest)
    requests = CompletionRenderer(asked).generation_requests(CALLER, 8)
    return [request.prompt for request in requests]


def test_every_text_of_a_completion_has_the_suffix() -> None:
    assert completions(prompt=["a", "c"], suffix="b") == [GAP, Prompt(text="c", suffix="b")]
    assert completions(prompt="", suffix="b") == [Prompt(text="", suffix="b")]
    assert completions(prompt="a", suffix="") == [Prompt(text="a")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]], "suffix": "b"}, "prompt"),
    ],
)
def test_what_a_suffix_excludes_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        completions(**fields)
    assert refusal.value.param == param


def test_a_suffix_comes_over_grpc() -> None:
    assert prompt_of(inference_pb2.CompleteRequest(text="a", suffix="b")) == GAP
    empty = inference_pb2.CompleteRequest(text="", suffix="b")
    assert prompt_of(empty) == Prompt(text="", suffix="b")
    echo = common_pb2.Sampling(echo=True)
    with pytest.raises(BadRequest, match="suffix together with echo"):
        prompt_of(inference_pb2.CompleteRequest(text="a", suffix="b", sampling=echo))


def test_a_suffix_comes_from_ollamas_clients_without_a_template() -> None:
    def asked(**fields: Any) -> GenerateRequest:
        return ollama.decode(json.dumps({"model": "m"} | fields).encode(), GenerateRequest)

    assert to_prompt(asked(prompt="a", suffix="b")) == GAP
    assert not is_load(asked(suffix="b"))
    assert to_prompt(asked(prompt="a", suffix="")).WhichOneof("kind") == "conversation"
