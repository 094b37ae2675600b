"""Benchmarks of encoders at small sizes: what they compute, not how fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater.bench import encoder_shapes, rerank
from headwater.bench.encoders import Subject
from headwater.bench.served_encoder import in_process
from tests.engine_core.small_encoders import random_encoder
from tests.engine_core.small_models import convert

TEXTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 2, 17, 64)]


def test_texts_that_are_asked_for_in_turn_all_end(tmp_path: Path) -> None:
    random_encoder("bert", tmp_path / "hf")
    subject = Subject(convert(tmp_path / "hf", tmp_path / "ours"), num_threads=1)
    found = in_process(subject, TEXTS * 3, at_once=2)
    assert (found.where, found.at_once) == ("in process", 2)
    assert 0 < found.p50_ms <= found.p99_ms


@pytest.mark.long
def test_work_of_a_shape_is_that_of_its_products_and_its_attention() -> None:
    shape = replace(encoder_shapes.MINILM, num_layers=1, texts=2, tokens=80, vocab_size=100)
    # Four products of the hidden size, two of the inner one, and scores and their sums.
    a_token = 2 * (4 * 384**2 + 2 * 384 * 1536) + 4 * 80 * 384
    assert shape.flops == 2 * 80 * a_token
    rates = encoder_shapes.measure((replace(shape, texts=1), shape), "cpu", rounds=1)
    assert [rate.texts for rate in rates] == [1, 2]
    assert min(min(rate.texts_per_second, rate.launched_milliseconds) for rate in rates) > 0


@pytest.mark.long
def test_a_cross_encoder_of_a_random_head_scores_as_its_peer(tmp_path: Path) -> None:
    pytest.importorskip(
        "sentence_transformers", reason="wants pip install sentence-transformers, which no lock has"
    )
    source = tmp_path / "source"
    source.mkdir()
    rerank.make_cross_encoder(source)
    query, documents = rerank.random_texts(source, documents=3, tokens=20)
    ranker = rerank.Ranker(source, tmp_path / "ours", num_threads=1)
    peer = rerank.CrossEncoder(source)
    row = rerank.measure(ranker, peer, query, documents, rounds=1)
    assert (row.documents, row.tokens) == (3, 20)
    assert row.largest_difference < 1e-4
