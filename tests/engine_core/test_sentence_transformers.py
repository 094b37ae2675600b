"""Vectors and scores against sentence-transformers, from text on: its tokens, prompts, pooling,
dense layers and heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.kv.prefix_hash import HASH_LEN
from headwater.proto import common_pb2, processor_pb2
from headwater.services.engine.programs.convert import ConvertSettings, convert
from headwater.services.engine.stage.requests import POOLINGS
from headwater.services.models.store import default_cache_dir, find_source
from headwater.services.processor.prepare import prepare
from headwater.services.runtime.progress import silent
from headwater.services.text.model import ServingChoices, load_text_model
from tests.engine_core.small_encoders import (
    cosine,
    embed,
    random_classifier,
    random_encoder,
    write_modules,
)
from tests.engine_core.small_models import SmallEngine
from tests.engine_core.small_rerankers import random_judge, write_logit_score
from tests.services.processor.test_embedded_text import write_tokenizer
from tests.services.processor.test_pairs import OWN
from tests.services.text.small_tokenizers import byte_level

pytestmark = pytest.mark.long
library: Any = pytest.importorskip(
    "sentence_transformers", reason="wants pip install sentence-transformers, which no lock has"
)
TEXTS = ["a", "a b c", "b c a bs c a b", "c " * 60]
QUERY = "a b"


def write_byte_level(folder: Path) -> None:
    """A tokenizer of a decoder, which ends each text with a token as Qwen3-Embedding's does."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_start|>",
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_word_pieces(folder: Path) -> None:
    write_tokenizer(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "sep_token": "[SEP]",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Subject:
    """A converted folder: texts in, vectors out, as a deployment computes them."""

    def __init__(self, source: Path, folder: Path) -> None:
        folder.mkdir()
        convert(ConvertSettings(source=source, folder=folder, name="small", revision="1"))
        self.model = load_text_model(folder, "small", ServingChoices())
        self._engine = SmallEngine(folder)

    def vectors(
        self, prompts: list[processor_pb2.Prompt], prompt_name: str | None = None
    ) -> list[np.ndarray[Any, Any]]:
        replies = [
            prepare(
                self.model,
                processor_pb2.PrepareRequest(
                    prompt=prompt,
                    cache_namespace=bytes(HASH_LEN),
                    pooling=common_pb2.POOLING_MODEL,
                    prompt_name=prompt_name,
                ),
            )
            for prompt in prompts
        ]
        pooling = POOLINGS[replies[0].pooling]
        starts = [reply.second_start for reply in replies]
        return embed(self._engine, [list(reply.prompt_ids) for reply in replies], pooling, starts)

    def embed(self, texts: list[str], prompt_name: str | None = None) -> Any:
        return self.vectors([processor_pb2.Prompt(text=text) for text in texts], prompt_name)

    def score(self, query: str, documents: list[str]) -> list[float]:
        """Logits of a model with one label."""
        prompts = [processor_pb2.Prompt(text=query, pair=document) for document in documents]
        return [float(logit) for [logit] in self.vectors(prompts)]


def assert_alike(found: Any, expected: Any) -> None:
    for vector, same in zip(found, expected, strict=True):
        assert cosine(vector, np.asarray(same)) >= 1 - 1e-6


@pytest.mark.parametrize(("family", "pooling"), [("bert", "mean_tokens"), ("mpnet", "cls_token")])
def test_an_encoder_embeds_as_sentence_transformers_does(
    family: str, pooling: str, tmp_path: Path
) -> None:
    source = tmp_path / "hf"
    random_encoder(family, source)
    write_word_pieces(source)
    torch.manual_seed(1)
    write_modules(source, pooling, dense=[torch.nn.Linear(64, 48)])
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    config = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    (source / "config_sentence_transformers.json").write_text(json.dumps(config))
    reference = library.SentenceTransformer(str(source), device="cpu")
    subject = Subject(source, tmp_path / "ours")
    assert_alike(subject.embed(TEXTS), reference.encode(TEXTS))
    assert_alike(subject.embed(TEXTS, "query"), reference.encode(TEXTS, prompt_name="query"))


def test_the_published_minilm_embeds_as_sentence_transformers_does(tmp_path: Path) -> None:
    source = find_source(
        "all-minilm-l6-v2", revision=None, cache_dir=default_cache_dir(), progress=silent
    )
    folder = source.obtain(silent)
    texts = [
        "The cat sits outside.",
        "A man plays the guitar, and nobody listens.",
        "Überraschung! " * 40,
        " ".join(["river"] * 200),
    ]
    reference = library.SentenceTransformer(str(folder), device="cpu")
    assert_alike(Subject(folder, tmp_path / "ours").embed(texts), reference.encode(texts))


def test_a_decoder_embeds_as_sentence_transformers_does(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    random_judge(source)
    write_byte_level(source)
    write_modules(source, "lasttoken")
    config = {"prompts": {"query": "Instruct: find\nQuery:", "document": ""}}
    (source / "config_sentence_transformers.json").write_text(json.dumps(config))
    reference = library.SentenceTransformer(str(source), device="cpu")
    subject = Subject(source, tmp_path / "ours")
    assert_alike(subject.embed(TEXTS), reference.encode(TEXTS))
    assert_alike(subject.embed(TEXTS, "query"), reference.encode(TEXTS, prompt_name="query"))


def test_a_cross_encoder_scores_as_sentence_transformers_does(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    random_classifier("bert", source)
    write_word_pieces(source)
    reference = library.CrossEncoder(str(source), device="cpu")
    pairs = [(QUERY, text) for text in TEXTS]
    expected = reference.predict(pairs, activation_fn=torch.nn.Identity())
    found = Subject(source, tmp_path / "ours").score(QUERY, TEXTS)
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_judge_scores_as_sentence_transformers_does(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    random_judge(source)
    write_byte_level(source)
    write_logit_score(source, 7, 11)
    (source / "chat_template.jinja").write_text(OWN)
    described = {
        "transformer_task": "text-generation",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "logits"},
            "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
        },
        "module_output_name": "causal_logits",
    }
    (source / "sentence_bert_config.json").write_text(json.dumps(described))
    (source / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    reference = library.CrossEncoder(str(source), device="cpu")
    pairs = [(QUERY, text) for text in TEXTS]
    expected = reference.predict(pairs, activation_fn=torch.nn.Identity())
    found = Subject(source, tmp_path / "ours").score(QUERY, TEXTS)
    assert found == pytest.approx(expected.tolist(), abs=1e-4)
