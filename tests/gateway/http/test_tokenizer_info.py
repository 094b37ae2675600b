"""What remote tokenizers ask of a server, lm-eval's for one: without the model's name where there
is only one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import jinja2
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, THINKER, Behind, Gateway, processor_stage, started
from tests.small_models import THINKING_TEMPLATE, make_thinking_folder

INFO = "/tokenizer_info"


@pytest.fixture(scope="module")
def telling(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    with start_gateway(behind, "--tokenizer-info") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def of_two(
    behind: Behind,
    text_folder: Path,
    start_gateway: GatewayStarter,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    """A gateway of two models."""
    folder = make_thinking_folder(
        text_folder, tmp_path_factory.mktemp("models") / THINKER, name=THINKER
    )
    processor = processor_stage(text_folder, f"--model-folder={folder}")
    with (
        started(processor),
        start_gateway(
            Behind(processor.address, behind.output_processor, behind.replicas), "--tokenizer-info"
        ) as gateway,
    ):
        gateway.wait_until(lambda: len(gateway.client.get("/v1/models").json()["data"]) == 2)
        yield gateway


def test_the_tokenizer_and_its_template_are_returned_where_the_operator_allows_it(
    telling: Gateway, gateway: Gateway
) -> None:
    info = telling.client.get(INFO).json()
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert info["tokenizer_class"]
    assert not [name for name in info if name.endswith("_file")]
    # A client renders a chat as the server does.
    messages = [{"role": "user", "content": "Name a river."}]
    text = jinja2.Template(info["chat_template"]).render(
        messages=messages, add_generation_prompt=True
    )
    asked = {"prompt": text, "add_special_tokens": False}
    tokens = telling.client.post("/tokenize", json=asked).json()["tokens"]
    assert tokens == telling.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    refused = gateway.client.get(INFO)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "path_not_found")
    assert "--tokenizer-info" in refused.json()["error"]["message"]


def test_the_only_model_need_not_be_named(gateway: Gateway) -> None:
    named = gateway.client.post(
        "/tokenize", json={"model": MODEL, "prompt": "Once upon a time"}
    ).json()
    asked = {"prompt": "Once upon a time", "add_special_tokens": False}
    assert gateway.client.post("/tokenize", json=asked).json() == named
    text = gateway.client.post("/detokenize", json={"tokens": named["tokens"]}).json()
    assert text == {"prompt": "Once upon a time"}
    assert (
        gateway.client.post("/tokenize", json={"model": "nobody", "prompt": "a"}).status_code == 404
    )
    assert gateway.client.post("/tokenize", json={"model": "", "prompt": "a"}).status_code == 404


async def test_the_only_model_need_not_be_named_on_grpc_either(gateway: Gateway) -> None:
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        prompt = processor_pb2.Prompt(text="Once upon a time")
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt=prompt))
        reply = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert reply.text == "Once upon a time"


def test_one_of_several_models_has_to_be_named(of_two: Gateway) -> None:
    for reply in (
        of_two.client.post("/tokenize", json={"prompt": "a"}),
        of_two.client.post("/detokenize", json={"tokens": [5]}),
        of_two.client.get(INFO),
    ):
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, "model", "missing_field")
        assert error["message"] == f"model is missing; allowed: one of {MODEL}, {THINKER}"
    assert (
        of_two.client.get(INFO, params={"model": THINKER}).json()["chat_template"]
        == THINKING_TEMPLATE
    )
    assert (
        of_two.client.post("/tokenize", json={"model": MODEL, "prompt": "a"}).json()["count"] == 1
    )


def test_a_slash_behind_the_list_of_models_changes_nothing(gateway: Gateway) -> None:
    assert gateway.client.get("/v1/models/").json() == gateway.client.get("/v1/models").json()
    assert gateway.client.get("/v1/models/").json()["data"][0]["id"] == MODEL
    assert gateway.client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert gateway.client.get("/v1/models//").status_code == 404
