"""Embeddings over the whole line, with the official client, on the wire and over gRPC."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.processes import MODEL, Gateway

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.rest}/v1", api_key="any", max_retries=0) as official:
        yield official


def vectors(gateway: Gateway, given: Any, **more: Any) -> list[list[float]]:
    reply = gateway.client.post(PATH, json={"model": MODEL, "input": given} | more)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


def test_the_official_client_gets_a_vector_for_each_text(
    client: openai.OpenAI, gateway: Gateway
) -> None:
    # It asks for base64 and reads it.
    whole = client.embeddings.create(model=MODEL, input=["A river.", "A lake.", "A river."])
    first, second, again = (entry.embedding for entry in whole.data)
    assert first == again != second
    assert math.isclose(math.hypot(*first), 1, rel_tol=1e-5)
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == 9
    assert vectors(gateway, "A river.")[0] == pytest.approx(first, rel=1e-6)


def test_texts_and_their_tokens_have_the_same_vector(gateway: Gateway) -> None:
    ids = gateway.client.post("/tokenize", json={"model": MODEL, "prompt": "A river."}).json()[
        "tokens"
    ]
    [text] = vectors(gateway, "A river.")
    assert vectors(gateway, ids) == vectors(gateway, [ids]) == [text]
    assert vectors(gateway, "The great A river.", truncate_prompt_tokens=3) != [text]


def test_vectors_are_cut_and_scaled_as_asked(gateway: Gateway) -> None:
    [raw] = vectors(gateway, "A river.", normalize=False)
    [short] = vectors(gateway, "A river.", dimensions=8)
    length = math.hypot(*raw[:8])
    assert short == pytest.approx([value / length for value in raw[:8]])
    assert vectors(
        gateway, "A river.", dimensions=8, embed_dtype="float32", endianness="little"
    ) == [short]
    assert len(raw) == 64


def test_a_conversation_has_the_vector_of_its_prompt(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "A river."}, {"role": "assistant", "content": "A lake"}]
    for fields in (
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"add_special_tokens": True},
    ):
        asked = {"model": MODEL, "messages": messages, "add_generation_prompt": False} | fields
        ids = gateway.client.post("/tokenize", json=asked).json()["tokens"]
        body = {"model": MODEL, "messages": messages, "dimensions": 8} | fields
        reply = gateway.client.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        [entry] = reply.json()["data"]
        assert [entry["embedding"]] == vectors(gateway, ids, dimensions=8)
        assert reply.json()["usage"]["prompt_tokens"] == len(ids)


def test_embedding_leaves_nothing_running(gateway: Gateway) -> None:
    vectors(gateway, [f"Text {i}" for i in range(40)], pooling="mean")
    gateway.wait_until(lambda: gateway.metric("headwater_num_streams") == 0)


async def test_grpc_embeds_alike(gateway: Gateway) -> None:
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.EmbedRequest(
            model=MODEL,
            inputs=[processor_pb2.Prompt(text="A river.")],
            pooling=common_pb2.POOLING_CLS,
            dimensions=8,
        )
        reply = await stub.Embed(request)
        assert list(reply.embeddings[0].values) == pytest.approx(
            vectors(gateway, "A river.", pooling="cls", dimensions=8)[0], rel=1e-6
        )
        assert reply.usage.prompt_tokens == 3
        for side in ("left", "right"):
            cut = inference_pb2.EmbedRequest(
                model=MODEL, inputs=request.inputs, truncate_prompt_tokens=2, truncation_side=side
            )
            [same] = vectors(gateway, "A river.", truncate_prompt_tokens=2, truncation_side=side)
            assert list((await stub.Embed(cut)).embeddings[0].values) == pytest.approx(
                same, rel=1e-6
            )
        request.dimensions = 65
        with pytest.raises(
            grpc.aio.AioRpcError, match="dimensions is 65; allowed: 1…64"
        ) as refused:
            await stub.Embed(request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"input": "a", "continue_final_message": True}, "continue_final_message"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [49152]}, "input"),
        ({"input": "a " * 9000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "base64", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "encoding_format": "base64", "endianness": "big"}, "endianness"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_refused_by_name(
    gateway: Gateway, body: dict[str, Any], param: str
) -> None:
    reply = gateway.client.post(PATH, json={"model": MODEL} | body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
