"""Rates of encoders of published shapes on one device, with random weights: texts a second, and the
share of the device's multiplications that they take."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from headwater.engine_core.executor import AdmittedRow, Executor, StepPlan
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.sampling_params import SamplingParams

POOLED = SamplingParams(max_tokens=0, pooling="cls")
PEAK = 796e12
"""Multiplications and additions a second of an H200 in bfloat16, as large products reach them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An encoder of the architecture of XLM-RoBERTa, and texts of one length."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    inner: int
    vocab_size: int
    texts: int
    tokens: int

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["XLMRobertaModel"],
            "model_type": "xlm-roberta",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": max(514, self.tokens + 2),
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
        }

    @property
    def flops(self) -> int:
        """Multiplications and additions of the layers for all texts."""
        products = 2 * (4 * self.hidden * self.hidden + 2 * self.hidden * self.inner)
        attention = 4 * self.tokens * self.hidden
        return self.texts * self.tokens * self.num_layers * (products + attention)


BGE_M3 = Shape(
    name="bge-m3",
    num_layers=24,
    hidden=1024,
    num_heads=16,
    inner=4096,
    vocab_size=250_002,
    texts=64,
    tokens=512,
)
MINILM = Shape(
    name="MiniLM-L6",
    num_layers=6,
    hidden=384,
    num_heads=12,
    inner=1536,
    vocab_size=30_522,
    texts=256,
    tokens=128,
)
MOST_TEXTS = 128
"""Texts of a step at most."""
SHORT = ((1, 16), (1, 64), (1, 512), (16, 16), (16, 64), (128, 16))
"""Numbers of texts and of their tokens, of which a step has few."""
SHAPES = tuple(
    (*(replace(shape, texts=texts, tokens=tokens) for texts, tokens in SHORT), shape)
    for shape in (BGE_M3, MINILM)
)
"""Shapes of one encoder each, the largest step last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Medians over rounds."""

    name: str
    texts: int
    tokens: int
    launched_milliseconds: float
    """Milliseconds of a step before its graph is captured."""
    milliseconds: float
    texts_per_second: float
    tflops: float
    share_of_peak: float
    """Share of what large products reach on an H200."""


def measure(shapes: Sequence[Shape], device: str, rounds: int) -> list[Rate]:
    """Times steps of an encoder in bfloat16, before and after its executor has prepared all that
    makes steps faster. The last shape is the largest."""
    executor = built(shapes[-1], device)
    launched = [median(_seconds(executor, shape, rounds)) for shape in shapes]
    while executor.prepare():
        pass
    taken = [median(_seconds(executor, shape, rounds)) for shape in shapes]
    executor.close()
    return [_rate(*each) for each in zip(shapes, launched, taken, strict=True)]


def _rate(shape: Shape, launched: float, taken: float) -> Rate:
    return Rate(
        name=shape.name,
        texts=shape.texts,
        tokens=shape.tokens,
        launched_milliseconds=round(launched * 1e3, 3),
        milliseconds=round(taken * 1e3, 3),
        texts_per_second=round(shape.texts / taken, 1),
        tflops=round(shape.flops / taken / 1e12, 1),
        share_of_peak=round(shape.flops / taken / PEAK, 3),
    )


def built(shape: Shape, device: str) -> Executor:
    """An executor of the shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config))
        options = ExecutorOptions(
            model_folder=Path(folder),
            device=device,
            dtype="bfloat16",
            load_format="dummy",
            block_size=64,
            max_num_batched_tokens=shape.texts * shape.tokens,
            max_num_seqs=max(shape.texts, MOST_TEXTS),
        )
        executor, _, _ = build_executor(options, lambda phase, done, total: None)
    return executor


def _plan(shape: Shape, step: int) -> StepPlan:
    random = np.random.default_rng(step)
    rows = np.arange(shape.texts, dtype=np.int32)
    ids = random.integers(3, shape.vocab_size, (shape.texts, shape.tokens)).astype(np.int32)
    admitted = [
        AdmittedRow(
            row=row,
            token_ids=ids[row],
            num_prompt_tokens=shape.tokens,
            sampling=POOLED,
            choice_index=0,
        )
        for row in range(shape.texts)
    ]
    return StepPlan(
        step=step,
        admitted=admitted,
        rows=rows,
        starts=np.zeros_like(rows),
        counts=np.full_like(rows, shape.tokens),
        samples=np.zeros(shape.texts, np.bool_),
        output_indices=np.zeros_like(rows),
        holds=np.zeros(shape.texts, np.bool_),
        pooled_rows=rows.tolist(),
    )


def _seconds(executor: Executor, shape: Shape, rounds: int) -> list[float]:
    """Seconds between the ends of steps, each launched before the one before it is read; the first
    two are left out."""
    plans = [_plan(shape, step) for step in range(rounds + 3)]
    ends = []
    executor.submit(plans[0])
    for plan in plans[1:]:
        executor.submit(plan)
        executor.retire(plan.step - 1)
        ends.append(time.perf_counter())
    executor.retire(plans[-1].step)
    return [end - start for start, end in itertools.pairwise(ends[1:])]
