"""Vectors and weights of tokens over the whole line: PyLate's files of a ColBERT, and bge-m3's
layer of weights, against the published arithmetic in float64."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from headwater.engine_core.config import ConfigError
from headwater.engine_core.weights.encoders.sentence_files import read_sentence_files
from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from headwater.services.engine.programs.convert import ConvertSettings, convert
from headwater.services.processor.prepare import prepare
from headwater.services.text.model import ServingChoices, load_text_model
from tests.engine_core.small_encoders import random_encoder
from tests.gateway.conftest import GatewayStarter
from tests.gateway.openai.test_scores import post
from tests.gateway.processes import QUIET, Behind, Gateway, Stage, started
from tests.gateway.public_grpc.test_bad_messages import refusal
from tests.services.processor.test_embedded_text import CLS, SEP, A, B, C, write_tokenizer

MASK, Q_MARK, D_MARK = 10, 11, 12
QUERY_LEN = 9
TEXTS = {"a b": [A, B], "b c a": [B, C, A], "c b b": [C, B, B]}
QUERY, *DOCUMENTS = TEXTS
LATE = {
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": QUERY_LEN,
    "document_length": 30,
    "attend_to_expansion_tokens": False,
    "skiplist_words": ["c", "!"],
}
DENSE = {
    "in_features": 64,
    "out_features": 16,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
    "use_residual": False,
}
Matrix = npt.NDArray[np.float64]


class Reference:
    """The same model in transformers, and the layers behind it."""

    def __init__(self, source: Path) -> None:
        self._model = random_encoder("bert", source).double()
        self._dense = torch.randn(16, 64, dtype=torch.float64)
        self._sparse = torch.randn(1, 64, dtype=torch.float64) / 8
        self._sparse_bias = torch.tensor([0.3], dtype=torch.float64)
        (source / "1_Dense").mkdir()
        save_file({"linear.weight": self._dense.float()}, source / "1_Dense" / "model.safetensors")
        (source / "1_Dense" / "config.json").write_text(json.dumps(DENSE))
        layer = {"weight": self._sparse.float(), "bias": self._sparse_bias.float()}
        torch.save(layer, source / "sparse_linear.pt")
        self._dense = self._dense.float().double()
        self._sparse = self._sparse.float().double()
        self._sparse_bias = self._sparse_bias.float().double()

    def _states(self, ids: list[int], attended: int) -> torch.Tensor:
        mask = torch.arange(len(ids)) < attended
        with torch.no_grad():
            found = self._model(torch.tensor([ids]), attention_mask=mask[None].long())
        states: torch.Tensor = found.last_hidden_state[0]
        return states

    def vectors(self, ids: list[int], attended: int | None = None) -> Matrix:
        states = self._states(ids, len(ids) if attended is None else attended)
        return (states @ self._dense.T).numpy()

    def similarity(self, query: str, document: str) -> float:
        """As PyLate scores: a query is filled up with masks that no token attends to, and skipped
        words of the document are left out."""
        asked = [CLS, Q_MARK, *TEXTS[query], SEP]
        filled = asked + [MASK] * (QUERY_LEN - len(asked))
        queries = self.vectors(filled, len(asked))
        ids = [CLS, D_MARK, *TEXTS[document], SEP]
        counted = [token_id != C for token_id in ids]
        documents = self.vectors(ids)[counted]
        scaled = [each / np.linalg.norm(each, axis=1)[:, None] for each in (queries, documents)]
        return float((scaled[0] @ scaled[1].T).max(1).sum())

    def weights(self, text: str) -> dict[str, float]:
        """As FlagEmbedding makes lexical weights."""
        ids = [CLS, *TEXTS[text], SEP]
        states = self._states(ids, len(ids))
        values = torch.relu(states @ self._sparse.T + self._sparse_bias)[:, 0].tolist()
        found: dict[str, float] = {}
        for token_id, weight in zip(ids, values, strict=True):
            if token_id not in (CLS, SEP) and weight > found.get(str(token_id), 0.0):
                found[str(token_id)] = weight
        return found


def write_files(source: Path) -> None:
    write_tokenizer(source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    marks = [AddedToken(mark, special=True) for mark in ("[MASK]", "[Q] ", "[D] ")]
    assert tokenizer.add_special_tokens(marks) == 3
    tokenizer.save(str(source / "tokenizer.json"))
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("CLS", "SEP", "PAD", "UNK", "MASK")}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "config_sentence_transformers.json").write_text(json.dumps(LATE))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("source")


@pytest.fixture(scope="module")
def reference(source: Path) -> Reference:
    made = Reference(source)
    write_files(source)
    return made


@pytest.fixture(scope="module")
def folder(reference: Reference, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("late")
    convert(ConvertSettings(source=source, folder=made, name="late", revision="1"))
    return made


@pytest.fixture(scope="module")
def served(folder: Path, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    flag = f"--model-folder={folder}"
    texts = [
        Stage(f"headwater.services.{stage}", flag, *QUIET)
        for stage in ("processor", "output_processor")
    ]
    engine = Stage("headwater.services.engine", flag, "--device=cpu", "--threads=1", *QUIET)
    with started(*texts, engine):
        behind = Behind(*(each.address for each in texts), (engine.address,))
        with start_gateway(behind) as gateway:
            gateway.wait_for_replicas(1)
            yield gateway


def test_a_document_scores_by_the_best_token_for_each_of_the_query(
    reference: Reference, served: Gateway
) -> None:
    scores = [reference.similarity(QUERY, document) for document in DOCUMENTS]
    results = post(served, "/v1/rerank", model="late", query=QUERY, documents=DOCUMENTS)["results"]
    assert [each["index"] for each in results] == sorted((0, 1), key=lambda i: -scores[i])
    for each in results:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-4)
    data = post(served, "/score", model="late", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [each["score"] for each in data] == pytest.approx(scores, abs=1e-4)


def test_pooling_returns_the_vector_of_each_token(reference: Reference, served: Gateway) -> None:
    [alone] = post(served, "/pooling", model="late", input=QUERY)["data"]
    np.testing.assert_allclose(
        alone["data"], reference.vectors([CLS, *TEXTS[QUERY], SEP]), atol=1e-4
    )
    asked = {"model": "late", "input": [QUERY, DOCUMENTS[0]], "prompt_name": "query"}
    filled, _ = post(served, "/pooling", **asked, normalize=True)["data"]
    assert np.linalg.norm(filled["data"], axis=1) == pytest.approx(np.ones(QUERY_LEN))


def test_pooling_returns_the_weights_of_words_and_scores_are_their_products(
    reference: Reference, served: Gateway
) -> None:
    texts = list(TEXTS)
    data = post(served, "/pooling", model="late", input=texts, pooling="sparse")["data"]
    expected = [reference.weights(text) for text in texts]
    assert any(expected)
    for each, weights in zip(data, expected, strict=True):
        assert each["data"] == pytest.approx(weights, abs=1e-5)
    products = [
        sum(weight * other.get(word, 0.0) for word, weight in expected[0].items())
        for other in expected[1:]
    ]
    asked = {"model": "late", "text_1": QUERY, "text_2": DOCUMENTS, "pooling": "sparse"}
    scores = post(served, "/v1/score", **asked)["data"]
    assert [each["score"] for each in scores] == pytest.approx(products, abs=1e-5)


def test_grpc_pools_and_scores_by_token_alike(served: Gateway) -> None:
    texts = [*TEXTS]
    inputs = [processor_pb2.Prompt(text=text) for text in texts]
    asked: dict[str, Any] = {"model": "late", "inputs": inputs, "normalize": False}
    with grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sparse = stub.Embed(
            inference_pb2.EmbedRequest(**asked, pooling=common_pb2.POOLING_SPARSE)
        ).embeddings
        by_token = stub.Embed(
            inference_pb2.EmbedRequest(**asked, pooling=common_pb2.POOLING_TOKEN)
        ).embeddings
        pairs = inference_pb2.ScoreRequest(
            model="late", text_1=[QUERY], text_2=DOCUMENTS, pooling=common_pb2.POOLING_SPARSE
        )
        scores = stub.Score(pairs).scores
        pairs.pooling = common_pb2.POOLING_CLS
        assert refusal(stub.Score, pairs) == (grpc.StatusCode.INVALID_ARGUMENT, "pooling")
    data = post(served, "/pooling", model="late", input=texts, pooling="sparse")["data"]
    for vector, each in zip(sparse, data, strict=True):
        weights = dict(zip(map(str, vector.token_ids), vector.values, strict=True))
        assert weights == pytest.approx(each["data"], abs=1e-6)
    data = post(served, "/pooling", model="late", input=texts, pooling="token")["data"]
    for vector, each in zip(by_token, data, strict=True):
        matrix = np.reshape(vector.values, (vector.num_vectors, -1))
        np.testing.assert_allclose(matrix, each["data"], atol=1e-6)
    asked = {"model": "late", "text_1": QUERY, "text_2": DOCUMENTS, "pooling": "sparse"}
    data = post(served, "/score", **asked)["data"]
    assert list(scores) == pytest.approx([each["score"] for each in data], abs=1e-6)


def test_one_vector_of_a_text_is_not_made_of_those_of_its_tokens(served: Gateway) -> None:
    reply = served.client.post("/v1/embeddings", json={"model": "late", "input": "a"})
    assert reply.status_code == 400
    assert "allowed: /pooling, /score and /rerank" in reply.json()["error"]["message"]


def test_a_query_is_filled_up_as_the_files_say(folder: Path) -> None:
    model = load_text_model(folder, "late", ServingChoices())
    late = model.late_interaction
    assert late is not None
    asked = processor_pb2.PrepareRequest(
        prompt=processor_pb2.Prompt(text=QUERY, side="query"),
        cache_namespace=bytes(16),
        pooling=common_pb2.POOLING_MODEL,
    )
    ids = [CLS, Q_MARK, A, B, SEP]
    filled = [*ids, *[MASK] * (QUERY_LEN - len(ids))]
    expected = {
        late: (filled, len(ids)),
        replace(late, attends_to_expansion=True): (filled, 0),
        replace(late, query_len=0): (ids, 0),
    }
    for each, (prompt_ids, attended_len) in expected.items():
        reply = prepare(replace(model, late_interaction=each), asked)
        assert (list(reply.prompt_ids), reply.attended_len) == (prompt_ids, attended_len)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"query_prefix": None}, "query_prefix is None; allowed: a text"),
        ({"query_length": 0}, "query_length is 0; allowed: a whole number, 1…65536"),
        ({"skiplist_words": "c"}, "skiplist_words is 'c'; allowed: a list of words"),
    ],
)
def test_files_that_do_not_say_how_tokens_are_compared_are_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write_files(tmp_path)
    (tmp_path / "1_Dense").mkdir()
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(LATE | changes))
    with pytest.raises(ConfigError, match=sentence):
        read_sentence_files(tmp_path)


def test_a_mark_that_the_tokenizer_does_not_know_is_refused(
    reference: Reference, source: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "source"
    shutil.copytree(source, changed)
    config = LATE | {"document_prefix": "[E] "}
    (changed / "config_sentence_transformers.json").write_text(json.dumps(config))
    settings = ConvertSettings(source=changed, folder=tmp_path / "it", name="it", revision="1")
    settings.folder.mkdir()
    with pytest.raises(ConfigError, match="allowed: one special token of the tokenizer"):
        convert(settings)
