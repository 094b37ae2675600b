"""`headwater bench encoders`: texts a second of an encoder in this process, beside plain torch on
padded batches, in turn on one machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.queue_policies import SHORTEST_FIRST
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.weights.model_file import load
from headwater.services.models.manifest import ModelManifest
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.runtime.settings import require

from . import encoder_shapes
from .figures import AsJson, show_rows
from .program import run_program

LENGTHS = (16, 256)
"""Tokens of the shortest and of the longest text."""
PADDED_BATCH = 32
"""Texts of a padded batch, as many as sentence-transformers takes by default."""
POOLED = SamplingParams(max_tokens=0, pooling="mean")
Texts = Sequence[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Medians over rounds in turn."""

    dtype: str
    texts: int
    tokens: int
    texts_per_second: float
    torch_texts_per_second: float
    ratio: float
    """Ratio of the two, the median of the rounds."""
    largest_distance: float
    """Largest 1 − cosine of two vectors of a text."""


class Subject:
    """An engine of an encoder in this process."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        options = ExecutorOptions(model_folder=folder, num_threads=num_threads)
        executor, config, _ = build_executor(options, lambda phase, done, total: None)
        # The order in which a deployment computes texts, so that latencies can be compared.
        self._engine = Engine(replace(config, policy=SHORTEST_FIRST), executor)

    def embed(
        self, texts: Texts, pooling: str = "mean", second_starts: Sequence[int] = ()
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Vectors of texts that come at once; `second_starts`: of pairs."""
        for key, text in enumerate(texts):
            start = second_starts[key] if second_starts else 0
            sampling = replace(POOLED, pooling=pooling, second_start=start)
            self._engine.add(NewRequest(key=key, prompt_ids=text, output_ids=[], sampling=sampling))
        vectors: dict[int, bytes] = {}
        while self._engine.has_work():
            if (output := self._engine.step()) is not None:
                vectors |= output.embeddings
        return [np.frombuffer(vectors[key], np.float32) for key in range(len(texts))]

    def latencies(self, texts: Texts, at_once: int) -> list[float]:
        """Seconds of each text, of which `at_once` are asked for at a time."""
        waiting = iter(enumerate(texts))
        started: dict[int, float] = {}
        seconds: list[float] = []

        def ask(count: int) -> None:
            for key, text in itertools.islice(waiting, count):
                started[key] = time.perf_counter()
                request = NewRequest(key=key, prompt_ids=text, output_ids=[], sampling=POOLED)
                self._engine.add(request)

        ask(at_once)
        while self._engine.has_work():
            if (output := self._engine.step()) is not None:
                ended = time.perf_counter()
                seconds += [ended - started[key] for key in output.embeddings]
                ask(len(output.embeddings))
        return seconds


class Peer:
    """The same model in plain torch: the longest texts first, in padded batches."""

    def __init__(self, folder: Path) -> None:
        self._config = registry.read_config(folder)
        self._tensors = load(folder, torch.device("cpu"), lambda done, total: None)

    def _states(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """ids and mask [R, L] → hidden states [R, L, H]."""
        tensors = self._tensors
        rows = tensors["embed"][ids] + tensors["positions"][: ids.shape[1]] + tensors["types"][0]
        x = self._norm("embedding_norm", rows)
        seen = mask[:, None, None].bool()
        for i in range(self._config.num_layers):
            x = self._layer(f"layers.{i}.", x, seen)
        return x

    def _layer(self, prefix: str, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        qkv = self._linear(prefix + "qkv", x).view(*x.shape[:2], 3, self._config.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        joined = self._linear(prefix + "o", attended.transpose(1, 2).flatten(2))
        x = self._norm(prefix + "attention_norm", x + joined)
        inner = gelu(self._linear(prefix + "up", x))
        return self._norm(prefix + "output_norm", x + self._linear(prefix + "down", inner))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._tensors[name], self._tensors[name + "_bias"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._tensors[name]
        eps = self._config.rms_norm_eps
        return layer_norm(x, weight.shape, weight, self._tensors[name + "_bias"], eps)

    @torch.inference_mode()
    def embed(self, texts: Texts) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors: dict[int, Any] = {}
        for first in range(0, len(texts), PADDED_BATCH):
            batch = by_length[first : first + PADDED_BATCH]
            width = len(texts[batch[0]])
            ids = torch.zeros(len(batch), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(batch):
                ids[row, : len(texts[i])] = torch.tensor(texts[i])
                mask[row, : len(texts[i])] = 1
            states = self._states(ids, mask)
            pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            vectors |= dict(zip(batch, pooled.float().numpy(), strict=True))
        return [vectors[i] for i in range(len(texts))]


def random_texts(num_texts: int, vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    lengths = random.integers(*LENGTHS, num_texts, endpoint=True).tolist()
    return [random.integers(1000, vocab_size, length).tolist() for length in lengths]


def measure(subject: Subject, peer: Peer, texts: Texts, dtype: str, rounds: int) -> Measurement:
    """Measures both in turn, after a round that counts for nothing."""
    pairs = zip(subject.embed(texts), peer.embed(texts), strict=True)
    distance = max(1 - _cosine(ours, theirs) for ours, theirs in pairs)
    seconds = [(_seconds(subject, texts), _seconds(peer, texts)) for _ in range(rounds)]
    return Measurement(
        dtype=dtype,
        texts=len(texts),
        tokens=sum(map(len, texts)),
        texts_per_second=round(len(texts) / median(ours for ours, _ in seconds), 1),
        torch_texts_per_second=round(len(texts) / median(theirs for _, theirs in seconds), 1),
        ratio=round(median(theirs / ours for ours, theirs in seconds), 3),
        largest_distance=float(f"{distance:.1e}"),
    )


def _seconds(subject: Subject | Peer, texts: Texts) -> float:
    started = time.perf_counter()
    subject.embed(texts)
    return time.perf_counter() - started


def _cosine(
    first: np.ndarray[Any, np.dtype[np.float32]], second: np.ndarray[Any, np.dtype[np.float32]]
) -> float:
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    return float(first.astype(np.float64) @ second / lengths)


def main(
    texts: Annotated[int, typer.Option(help="Texts of a round.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds in turn.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of both; 0: torch's own number.")] = 2,
    device: Annotated[str, typer.Option(help="cpu, or cuda: shapes of encoders there.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Embeds texts of 16 to 256 tokens with all-MiniLM-L6-v2 on a CPU, in float32, bfloat16 and
    packed weights of eight bits; or times encoders of the shapes of bge-m3 and MiniLM with random
    weights on a GPU."""
    require(device in ("cpu", "cuda"), "device", device, "cpu or cuda")
    if device == "cuda":
        rates = [
            rate
            for shapes in encoder_shapes.SHAPES
            for rate in encoder_shapes.measure(shapes, device, rounds)
        ]
        show_rows(rates, "encoders with random weights, in bfloat16", as_json=as_json)
        return
    if threads:
        torch.set_num_threads(threads)
    name = "all-minilm-l6-v2"
    cache = default_cache_dir()

    def pulled(dtype: str, kind: str = "auto") -> Path:
        return pull(
            name, cache_dir=cache, progress=silent, dtype=dtype, device="cpu", quantization=kind
        )

    rows = []
    for dtype, kind in (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")):
        peer = Peer(pulled(dtype))
        folder = pulled(dtype, kind)
        asked = random_texts(texts, ModelManifest.read(folder).vocab_size)
        shown = dtype if kind == "auto" else kind
        rows.append(measure(Subject(folder, threads), peer, asked, shown, rounds))
    show_rows(rows, f"{name}, beside plain torch on padded batches", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
