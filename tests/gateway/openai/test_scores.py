"""Reranking, scores, labels and raw vectors over the whole line, against transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import torch
import transformers

from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.services.engine.programs.convert import ConvertSettings, convert
from headwater.services.text.model import load_tokenizer
from tests.engine_core.small_encoders import random_classifier, random_encoder, write_modules
from tests.gateway.conftest import GatewayStarter
from tests.gateway.jobs.batches.test_batches import as_jsonl, over, results, upload
from tests.gateway.processes import MODEL, QUIET, Behind, Gateway, Stage, started
from tests.gateway.public_grpc.test_bad_messages import refusal
from tests.gateway.test_clients import CLIENTS, reported
from tests.own_environment import python_with
from tests.services.processor.test_embedded_text import CLS, SEP, A, B, C, write_tokenizer
from tests.services.processor.test_pairs import CARD
from tests.services.processor.test_pairs import folder_of as judge_folder

QUERY = "a a"
DOCUMENTS = ["b", "c b c", "a c"]
DOCUMENT_IDS = [[B], [C, B, C], [A, C]]
JUDGE = "qwen3-reranker-tiny"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Any]:
    """Folders of a reranker and an embedder, and the reranker as transformers has it."""
    folders = {}
    for name in ("reranker", "embedder"):
        source = tmp_path_factory.mktemp("source")
        if name == "reranker":
            reference = random_classifier("bert", source)
        else:
            random_encoder("bert", source)
            write_modules(source, "mean_tokens")
        write_tokenizer(source)
        folders[name] = tmp_path_factory.mktemp(name)
        convert(ConvertSettings(source=source, folder=folders[name], name=name, revision="1"))
    folders[JUDGE] = judge_folder(tmp_path_factory.mktemp("judge"), JUDGE)
    return folders, reference


@pytest.fixture(scope="module")
def served(
    models: tuple[dict[str, Path], Any], start_gateway: GatewayStarter, nats_url: str
) -> Iterator[Gateway]:
    folders, _ = models
    flags = [f"--model-folder={folder}" for folder in folders.values()]
    texts = [
        Stage(f"headwater.services.{stage}", *flags, *QUIET)
        for stage in ("processor", "output_processor")
    ]
    engines = [
        Stage("headwater.services.engine", flag, "--device=cpu", "--threads=1", *QUIET)
        for flag in flags
    ]
    with started(*texts, *engines):
        behind = Behind(*(each.address for each in texts), tuple(each.address for each in engines))
        with start_gateway(behind, f"--nats-url={nats_url}") as gateway:
            gateway.wait_for_replicas(3)
            yield gateway


def expected_scores(reference: Any) -> list[float]:
    scores = []
    for ids in DOCUMENT_IDS:
        pair = [CLS, A, A, SEP, *ids, SEP]
        types = [0] * 4 + [1] * (len(ids) + 1)
        with torch.no_grad():
            logits = reference(torch.tensor([pair]), token_type_ids=torch.tensor([types])).logits
        scores.append(torch.sigmoid(logits).item())
    return scores


def post(gateway: Gateway, path: str, **body: Any) -> dict[str, Any]:
    reply = gateway.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_their_scores(
    path: str, models: tuple[dict[str, Path], Any], served: Gateway
) -> None:
    scores = expected_scores(models[1])
    ranked = sorted(range(3), key=lambda i: -scores[i])
    asked = {"model": "reranker", "query": QUERY, "documents": [*DOCUMENTS[:2], {"text": "a c"}]}
    answer = post(served, path, **asked, top_n=2)
    assert [result["index"] for result in answer["results"]] == ranked[:2]
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-5)
        text = None if path == "/v2/rerank" else {"text": DOCUMENTS[result["index"]]}
        assert result.get("document") == text
    assert answer["usage"]["prompt_tokens"] == sum(5 + len(ids) for ids in DOCUMENT_IDS)


def test_pairs_are_scored_in_their_order(
    models: tuple[dict[str, Path], Any], served: Gateway
) -> None:
    expected = expected_scores(models[1])
    for first in (QUERY, [QUERY] * 3):
        answer = post(served, "/v1/score", model="reranker", text_1=first, text_2=DOCUMENTS)
        assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)
    cosines = post(served, "/score", model="embedder", text_1="a", text_2=["a", "b"])["data"]
    first, second = (
        each["embedding"]
        for each in post(served, "/v1/embeddings", model="embedder", input=["a", "b"])["data"]
    )
    cosine = sum(x * y for x, y in zip(first, second, strict=True))
    assert [each["score"] for each in cosines] == pytest.approx([1, cosine], abs=1e-5)


def test_texts_get_labels_and_raw_vectors(served: Gateway) -> None:
    [entry] = post(served, "/classify", model="reranker", input="a b")["data"]
    [raw] = post(served, "/pooling", model="reranker", input="a b")["data"]
    assert entry["label"] == "LABEL_0"
    assert entry["probs"] == pytest.approx([1 / (1 + math.exp(-raw["data"][0]))])
    [vector] = post(served, "/pooling", model="embedder", input="a b")["data"]
    assert len(vector["data"]) == 64
    assert math.hypot(*vector["data"]) != pytest.approx(1, abs=1e-2)


def judged(folder: Path, instruction: str, query: str, document: str) -> float:
    """The probability of yes against no, as the model card computes it."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "source")
    tokenizer = load_tokenizer(folder)
    text = CARD.format(instruction=instruction, query=query, document=document)
    ids = tokenizer.encode(text, add_special_tokens=False)
    yes_and_no = [tokenizer.id_of(word) for word in ("yes", "no")]
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0, -1, yes_and_no]
    return logits.log_softmax(0).exp()[0].item()


def test_a_model_of_tokens_judges_by_yes_and_no(
    models: tuple[dict[str, Path], Any], served: Gateway
) -> None:
    asked = {"query": "hello", "documents": ["the hello", "in"], "instruction": "Find greetings."}
    results = post(served, "/v1/rerank", model=JUDGE, **asked)["results"]
    expected = [
        judged(models[0][JUDGE], "Find greetings.", "hello", text) for text in asked["documents"]
    ]
    for result in results:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
    assert [result["index"] for result in results] == sorted((0, 1), key=lambda i: -expected[i])


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        (
            "/rerank",
            {"model": "reranker", "query": "a", "documents": ["b"], "instruction": "c"},
            "instruction is 'c'; allowed: none with a model whose pairs have no template",
        ),
        (
            "/score",
            {"model": "embedder", "text_1": "a", "text_2": "b", "instruction": "c"},
            "instruction is 'c'; allowed: none with a model that embeds",
        ),
        (
            "/v1/embeddings",
            {"model": "reranker", "input": "a"},
            "the model 'reranker' classifies texts and embeds none",
        ),
        (
            "/v1/completions",
            {"model": "reranker", "prompt": "a"},
            "the model 'reranker' classifies texts and answers none",
        ),
        (
            "/classify",
            {"model": "embedder", "input": "a"},
            "it is served for: embedding, rerank, score",
        ),
        (
            "/score",
            {"model": "reranker", "text_1": "a", "text_2": "b", "pooling": "sparse"},
            "pooling with a model that classifies",
        ),
        (
            "/pooling",
            {"model": "reranker", "input": "a", "pooling": "token"},
            "the model 'reranker' has no vectors of tokens",
        ),
        (
            "/pooling",
            {"model": "embedder", "input": "a", "pooling": "sparse"},
            "the model 'embedder' makes no weights of tokens",
        ),
        (
            "/score",
            {"model": "reranker", "text_1": ["a", "b"], "text_2": ["a"]},
            "text_1 has 2 texts and text_2 has 1",
        ),
        (
            "/rerank",
            {"model": "reranker", "query": "a", "documents": []},
            "documents is []; allowed: at least one document",
        ),
        (
            "/rerank",
            {"model": "reranker", "query": "a", "documents": ["b " * 400]},
            "the documents has 404 tokens; allowed: at most 322",
        ),
        (
            "/score",
            {"model": "reranker", "text_1": "a", "text_2": ["b " * 400]},
            "the text_2 has 404 tokens; allowed: at most 322",
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused_with_what_it_can(
    path: str, body: dict[str, Any], sentence: str, served: Gateway
) -> None:
    reply = served.client.post(path, json=body)
    assert reply.status_code == 400
    assert sentence in reply.json()["error"]["message"]


def test_a_long_document_is_cut_where_the_client_asks_for_it(served: Gateway) -> None:
    asked = {"model": "reranker", "query": "a", "documents": ["b " * 400]}
    answer = post(served, "/rerank", **asked, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 322


def test_models_say_what_they_can_do(served: Gateway) -> None:
    cards = {card["id"]: card for card in served.client.get("/v1/models").json()["data"]}
    assert cards["reranker"]["capabilities"] == ["classify", "rerank", "score"]
    assert cards["embedder"]["capabilities"] == ["embedding", "rerank", "score"]


def test_a_model_that_generates_reranks_nothing(gateway: Gateway) -> None:
    reply = gateway.client.post("/rerank", json={"model": MODEL, "query": "a", "documents": ["b"]})
    assert reply.status_code == 400
    assert "it is served for: completion, embedding" in reply.json()["error"]["message"]


def test_grpc_ranks_and_scores_alike(served: Gateway) -> None:
    with grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        asked: dict[str, Any] = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS}
        expected = post(served, "/v1/rerank", **asked, top_n=2)
        reply = stub.Rerank(
            inference_pb2.RerankRequest(
                **asked, top_n=2, return_documents=True, client_request_id="mine"
            )
        )
        assert reply.client_request_id == "mine"
        assert reply.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
        assert [each.index for each in reply.results] == [
            each["index"] for each in expected["results"]
        ]
        for each, same in zip(reply.results, expected["results"], strict=True):
            assert each.relevance_score == same["relevance_score"]
            assert each.document == same["document"]["text"]
        scores = stub.Score(
            inference_pb2.ScoreRequest(model="embedder", text_1=["a"], text_2=["a", "b"])
        ).scores
        data = post(served, "/score", model="embedder", text_1="a", text_2=["a", "b"])["data"]
        assert list(scores) == pytest.approx([each["score"] for each in data], abs=1e-6)
        cut = inference_pb2.ScoreRequest(
            model="reranker", text_1=["a"], text_2=["b " * 400], truncate_prompt_tokens=10
        )
        assert stub.Score(cut).usage.prompt_tokens == 10


@pytest.mark.parametrize(
    ("method", "request_", "param"),
    [
        ("Rerank", inference_pb2.RerankRequest(model="reranker", query="a"), "documents"),
        (
            "Rerank",
            inference_pb2.RerankRequest(model="reranker", query="a", documents=["b"], top_n=0),
            "top_n",
        ),
        (
            "Rerank",
            inference_pb2.RerankRequest(model="reranker", query="a", documents=["b " * 400]),
            "documents",
        ),
        (
            "Rerank",
            inference_pb2.RerankRequest(
                model="reranker", query="a", documents=["b"], instruction="c"
            ),
            "instruction",
        ),
        (
            "Score",
            inference_pb2.ScoreRequest(model="reranker", text_1=["a", "b"], text_2=["a"]),
            "text_2",
        ),
        (
            "Score",
            inference_pb2.ScoreRequest(model="reranker", text_1=["a"], text_2=["b"], priority=-1),
            "priority",
        ),
    ],
)
def test_grpc_names_the_field_of_what_it_does_not_score(
    method: str, request_: Any, param: str, served: Gateway
) -> None:
    with grpc.insecure_channel(served.grpc) as channel:
        call = getattr(inference_pb2_grpc.InferenceStub(channel), method)
        assert refusal(call, request_) == (grpc.StatusCode.INVALID_ARGUMENT, param)


BATCHED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "embedder", "input": "a b"},
    "/v1/rerank": {"model": "reranker", "query": QUERY, "documents": DOCUMENTS},
    "/v2/rerank": {"model": JUDGE, "query": QUERY, "documents": DOCUMENTS},
    "/v1/score": {"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS},
    "/classify": {"model": "reranker", "input": ["a b"]},
}


def test_batches_hold_embeddings_and_scores(served: Gateway) -> None:
    with openai.OpenAI(base_url=f"{served.rest}/v1", api_key="any", max_retries=0) as client:
        begun = {}
        for path, body in BATCHED.items():
            line = {"custom_id": "it", "method": "POST", "url": path, "body": body}
            file_id = upload(client, as_jsonl([line]))
            endpoint: Any = path
            begun[path] = client.batches.create(
                input_file_id=file_id, endpoint=endpoint, completion_window="24h"
            ).id
        for path, batch_id in begun.items():
            [result] = results(client, over(client, batch_id).output_file_id)
            answer = result["response"]["body"]
            alone = post(served, path, **BATCHED[path])
            for field in {"data", "results"} & alone.keys():
                assert answer[field] == alone[field]


def test_what_open_webui_sends_for_its_documents_is_embedded_and_ranked(
    models: tuple[dict[str, Path], Any], served: Gateway
) -> None:
    """Bodies and headers as its retrieval sends them: the package alone has more than a
    gigabyte of dependencies."""
    headers = {"Authorization": "Bearer any", "X-OpenWebUI-User-Name": "Ada"}
    asked = {"input": DOCUMENTS, "model": "embedder"}
    reply = served.client.post("/v1/embeddings", headers=headers, json=asked)
    assert [len(each["embedding"]) for each in reply.json()["data"]] == [64] * 3
    asked = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS, "top_n": 3}
    reply = served.client.post("/v1/rerank", headers=headers, json=asked)
    by_index = sorted(reply.json()["results"], key=lambda each: each["index"])
    scores = [each["relevance_score"] for each in by_index]
    assert scores == pytest.approx(expected_scores(models[1]), abs=1e-5)


RAG_PACKAGES = (
    *("cohere", "langchain-openai", "langchain-cohere", "haystack-ai", "cohere-haystack"),
    *("llama-index-embeddings-openai-like", "llama-index-postprocessor-cohere-rerank"),
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_clients_of_rag_stacks_embed_and_rank(served: Gateway, tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", *RAG_PACKAGES)
    sent = reported(python, str(CLIENTS / "rag_client.py"), served.rest, "embedder", "reranker")
    print(sent["versions"])
    results = post(
        served, "/v1/rerank", model="reranker", query=QUERY, documents=["b", "c b c", "a c"]
    )["results"]
    ranked = [[each["index"], each["relevance_score"]] for each in results]
    named = [[DOCUMENTS[i], score] for i, score in ranked[:2]]
    vectors = [
        each["embedding"]
        for each in post(served, "/v1/embeddings", model="embedder", input=DOCUMENTS)["data"]
    ]
    for version in ("v1", "v2"):
        assert sent["cohere"][version] == ranked
    for stack in ("langchain", "llama_index", "haystack"):
        assert sent[stack]["ranked"] == named
        for found, expected in zip(sent[stack]["vectors"], vectors, strict=True):
            assert found == pytest.approx(expected, abs=1e-6)
