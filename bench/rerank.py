"""`headwater bench rerank`: pairs a second of a cross-encoder in this process, from text on, beside
sentence-transformers' CrossEncoder, in turn on one machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import load_file, save_file

from headwater.engine_core.kv.prefix_hash import HASH_LEN
from headwater.proto import common_pb2, processor_pb2
from headwater.services.engine.programs.convert import ConvertSettings, convert
from headwater.services.models.store import default_cache_dir, find_source
from headwater.services.processor.prepare import prepare
from headwater.services.runtime.hardware import resolve_dtype
from headwater.services.runtime.progress import silent
from headwater.services.runtime.settings import require
from headwater.services.text.model import ServingChoices, load_text_model

from .encoders import Subject
from .figures import AsJson, seconds_of, show_rows
from .program import run_program

MODEL = "all-minilm-l6-v2"
PEER = "sentence_transformers"
QUERY_TOKENS = 8
_WORD = re.compile(r"[a-z]{3,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Medians over rounds in turn."""

    dtype: str
    """Type that ours computes in."""
    is_default: bool
    """Whether a deployment takes that type on this machine unless an option names another."""
    documents: int
    tokens: int
    """Tokens of a document."""
    pairs_per_second: float
    peer_pairs_per_second: float
    ratio: float
    """Ratio of the two, the median of the rounds."""
    largest_difference: float
    """Largest difference of two logits of a pair."""


def make_cross_encoder(folder: Path) -> Path:
    """A MiniLM with a random head, as transformers saves it: its speed is that of a trained one,
    its scores have no meaning."""
    found = find_source(MODEL, revision=None, cache_dir=default_cache_dir(), progress=silent)
    source = found.obtain(silent)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    tensors = {f"bert.{name}": each for name, each in tensors.items() if "position_ids" not in name}
    random = torch.Generator().manual_seed(0)
    tensors["classifier.weight"] = torch.randn(1, config["hidden_size"], generator=random)
    tensors["classifier.bias"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Ranker:
    """A converted cross-encoder: texts in, logits out, as a deployment computes them."""

    def __init__(
        self, source: Path, folder: Path, num_threads: int, dtype: str = "float32"
    ) -> None:
        folder.mkdir()
        settings = ConvertSettings(
            source=source, folder=folder, name="ranker", revision="1", dtype=dtype
        )
        # Standard output is for figures, so progress is printed to standard error.
        with contextlib.redirect_stdout(sys.stderr):
            convert(settings)
        self._model = load_text_model(folder, "ranker", ServingChoices())
        self._engine = Subject(folder, num_threads)

    def logits(self, query: str, documents: list[str]) -> list[float]:
        prepared = [
            prepare(
                self._model,
                processor_pb2.PrepareRequest(
                    prompt=processor_pb2.Prompt(text=query, pair=document),
                    cache_namespace=bytes(HASH_LEN),
                    pooling=common_pb2.POOLING_MODEL,
                ),
            )
            for document in documents
        ]
        starts = [each.second_start for each in prepared]
        vectors = self._engine.embed(
            [list(each.prompt_ids) for each in prepared], pooling="cls", second_starts=starts
        )
        return [float(logit) for [logit] in vectors]


class CrossEncoder:
    """sentence-transformers', in float32 and batches of 32 as it computes by default."""

    def __init__(self, source: Path) -> None:
        library = importlib.import_module(PEER)
        self._model: Any = library.CrossEncoder(str(source), device="cpu")

    def logits(self, query: str, documents: list[str]) -> list[float]:
        pairs = [(query, document) for document in documents]
        found: list[float] = self._model.predict(
            pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False
        ).tolist()
        return found


def random_texts(source: Path, documents: int, tokens: int) -> tuple[str, list[str]]:
    """A query, and documents of so many tokens: words that are tokens of the model."""
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    words = np.array(sorted(filter(_WORD.fullmatch, vocabulary)))
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, tokens)) for _ in range(documents)]
    return " ".join(random.choice(words, QUERY_TOKENS)), texts


def measure(
    ranker: Ranker,
    peer: CrossEncoder,
    query: str,
    documents: list[str],
    rounds: int,
    dtype: str = "float32",
) -> Measurement:
    """Measures both in turn, after a round that counts for nothing."""
    pairs = zip(ranker.logits(query, documents), peer.logits(query, documents), strict=True)
    difference = max(abs(ours - theirs) for ours, theirs in pairs)
    seconds = [
        (
            *seconds_of(lambda: ranker.logits(query, documents), 1),
            *seconds_of(lambda: peer.logits(query, documents), 1),
        )
        for _ in range(rounds)
    ]
    return Measurement(
        dtype=dtype,
        is_default=dtype == resolve_dtype("auto", "cpu"),
        documents=len(documents),
        tokens=len(documents[0].split()),
        pairs_per_second=round(len(documents) / median(ours for ours, _ in seconds), 1),
        peer_pairs_per_second=round(len(documents) / median(theirs for _, theirs in seconds), 1),
        ratio=round(median(theirs / ours for ours, theirs in seconds), 3),
        largest_difference=float(f"{difference:.1e}"),
    )


def main(
    documents: Annotated[int, typer.Option(help="Documents of a query.")] = 100,
    tokens: Annotated[int, typer.Option(help="Tokens of a document.")] = 200,
    rounds: Annotated[int, typer.Option(help="Rounds in turn.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of both.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Scores documents by a MiniLM cross-encoder with a random head on a CPU, in float32 and
    bfloat16."""
    is_there = importlib.util.find_spec(PEER) is not None
    require(is_there, "peer", None, "sentence-transformers: pip install sentence-transformers")
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        make_cross_encoder(source)
        peer = CrossEncoder(source)
        query, texts = random_texts(source, documents, tokens)
        rows = []
        for dtype in ("float32", "bfloat16"):
            ranker = Ranker(source, Path(name) / dtype, threads, dtype)
            rows.append(measure(ranker, peer, query, texts, rounds, dtype))
    show_rows(rows, "a MiniLM cross-encoder, beside sentence-transformers", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
