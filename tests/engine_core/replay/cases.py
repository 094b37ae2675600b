"""Executors under replay: a small random model, what drafts for it, and where it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.engine_core.config import EngineConfig, require
from headwater.engine_core.executor import AdmittedRow, Executor, Int32Array, StepPlan
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.models import conversion
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.published_heads import CONFIGS, publish, random_heads
from tests.engine_core.replay.loads import (
    EOS,
    FIRST_TOKEN,
    MAX_DRAFTS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MOST_BATCHED_TOKENS,
    MOST_SPARE_BLOCKS,
    SPARE_ROWS,
    VOCAB_SIZE,
    Load,
)
from tests.engine_core.small_models import random_checkpoint

BLOCK_SIZE = 16
HOST_BYTES = 1 << 20
"""Host memory for blocks: some dozens."""
NONE, LOOK_UP, MODEL = "none", "look-up", "model"
HEADS = ("medusa", "eagle", "eagle3")
SIMULATED = "simulated"
ACCEPTANCE = 0.5
LIMITS: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_blocks": 1 + MAX_MODEL_LEN // BLOCK_SIZE + MOST_SPARE_BLOCKS,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_NUM_SEQS,
    "spare_rows": SPARE_ROWS,
    "max_num_batched_tokens": MOST_BATCHED_TOKENS,
    "async_depth": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and what drafts for it."""

    drafter: str = NONE
    family: str = "qwen3"
    dtype: str = "float32"
    weights: str = "auto"
    """Kind that the checkpoint's weights are rounded to; `auto`: none."""
    options: dict[str, Any] = field(default_factory=dict)
    """More fields of `ExecutorOptions`."""

    @property
    def name(self) -> str:
        parts = [self.drafter, self.family, self.dtype, self.weights, *self.options.values()]
        return ", ".join(map(str, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where models are computed, and those that are."""

    options: dict[str, Any]
    cases: tuple[Case, ...]


TREE = {"numerics": "tree"}
PLAIN = Case()
LOOKED_UP = Case(drafter=LOOK_UP)
BFLOAT16 = Case(drafter=LOOK_UP, dtype="bfloat16")
DRAFTED = Case(drafter=MODEL)
WINDOWS = Case(drafter=LOOK_UP, family="gemma3", dtype="bfloat16")
PLACES = {
    "cpu": Place(
        options={},
        cases=(
            PLAIN,
            LOOKED_UP,
            DRAFTED,
            *(Case(drafter=kind) for kind in HEADS),
            BFLOAT16,
            WINDOWS,
            Case(weights="int8"),
            Case(weights="int4"),
            Case(drafter=LOOK_UP, options=TREE),
        ),
    ),
    "cpu-ranks": Place(
        options={"tensor_parallel_size": 2},
        cases=(
            Case(options=TREE),
            LOOKED_UP,
            DRAFTED,
            *(Case(drafter=kind) for kind in HEADS),
            Case(drafter=LOOK_UP, dtype="bfloat16", options=TREE),
        ),
    ),
    "cpu-stages": Place(
        options={"pipeline_parallel_size": 2}, cases=(PLAIN, LOOKED_UP, BFLOAT16, WINDOWS)
    ),
    "cuda": Place(
        options={"device": "cuda"},
        cases=(
            Case(dtype="bfloat16"),
            BFLOAT16,
            Case(drafter=MODEL, dtype="bfloat16"),
            *(Case(drafter=kind, dtype="bfloat16") for kind in HEADS),
            WINDOWS,
            Case(drafter=LOOK_UP, dtype="bfloat16", weights="int8"),
            Case(drafter=LOOK_UP, dtype="bfloat16", weights="int4"),
            Case(drafter=LOOK_UP, dtype="bfloat16", options={"kv_cache_dtype": "fp8"}),
            Case(drafter=LOOK_UP, dtype="bfloat16", options=TREE),
            LOOKED_UP,
        ),
    ),
    SIMULATED: Place(
        options={}, cases=tuple(Case(drafter=each) for each in (NONE, LOOK_UP, MODEL))
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An executor for streams that follow one another."""

    place: str
    case: Case
    executor: Executor
    config: EngineConfig
    """The largest limits of a stream."""
    masks: Int32Array
    """[positions, rows, words], one table for all streams."""

    def config_of(self, load: Load) -> EngineConfig:
        return load.config(self.config)

    def clear(self) -> None:
        """Takes all rows from the requests of the stream before. To be called before a stream."""
        row = np.zeros(1, np.int32)
        one = np.ones(1, np.int32)
        admitted = AdmittedRow(
            row=0, token_ids=one, num_prompt_tokens=1, sampling=SamplingParams(), choice_index=0
        )
        # What is computed goes to the scratch block.
        plan = StepPlan(
            step=0,
            released=list(range(self.config.num_rows)),
            admitted=[admitted],
            rows=row,
            starts=row,
            counts=one,
            samples=np.zeros(1, np.bool_),
            output_indices=row,
            holds=np.zeros(1, np.bool_),
        )
        self.executor.retire(self.executor.submit(plan))

    @property
    def plain_limits(self) -> dict[str, Any]:
        """Limits of an engine in which a request meets nothing but its own prompt and answer."""
        return {
            "num_host_blocks": 0,
            "async_depth": 1,
            "enable_prefix_caching": False,
            "long_prefill_chunk": 0,
        }


class Checkpoints:
    """Folders of models and heads, each written once."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def model(self, case: Case) -> Path:
        """The served model."""
        return self._converted(case.family, case.dtype, case.weights)

    def draft(self, case: Case) -> Path:
        """The same weights, rounded: they draft right more often than not."""
        return self._converted(case.family, case.dtype, "int8")

    def heads(self, kind: str) -> Path:
        folder = self._base / kind
        return folder if folder.exists() else publish(folder, CONFIGS[kind], random_heads(kind))

    def _converted(self, family: str, dtype: str, weights: str) -> Path:
        folder = self._base / f"{family} {dtype} {weights}"
        if not folder.exists():
            source = self._base / family
            if not source.exists():
                random_checkpoint(family, source)
            folder.mkdir()
            conversion.convert(
                source,
                folder,
                dtype=dtype,
                progress=lambda done, total: None,
                quantization=weights,
            )
        return folder


def case_of(place: str, seed: int) -> Case:
    """Cases take turns with seeds."""
    cases = PLACES[place].cases
    return cases[seed % len(cases)]


def case_named(place: str, name: str) -> Case:
    """Raises `ConfigError` for a name that no case has."""
    cases = {case.name: case for case in PLACES[place].cases}
    require(name in cases, "case", name, "; ".join(cases))
    return cases[name]


@contextmanager
def built(place: str, case: Case, checkpoints: Checkpoints) -> Iterator[Built]:
    """An executor of that place, closed at the end."""
    if place == SIMULATED:
        executor, config = _simulated(case)
    else:
        executor, config = _computing(place, case, checkpoints)
    # Slots for blocks of any tier are the host tier's here.
    config = replace(
        config, num_host_blocks=config.num_swap_slots, num_peer_blocks=0, shares_kv_cache=False
    )
    shape = config.max_draft_tokens + 1, config.num_rows, VOCAB_SIZE // 32
    masks: Int32Array = np.zeros(shape, np.int32)
    try:
        executor.warm_up()
        while executor.prepare():
            pass
        yield Built(place=place, case=case, executor=executor, config=config, masks=masks)
    finally:
        executor.close()


def _max_drafts(case: Case) -> int:
    return 0 if case.drafter == NONE else MAX_DRAFTS


def _simulated(case: Case) -> tuple[Executor, EngineConfig]:
    config = EngineConfig(num_host_blocks=40, max_draft_tokens=_max_drafts(case), **LIMITS)
    model = SimulatedModel(
        vocab_size=VOCAB_SIZE,
        first_token_id=FIRST_TOKEN,
        eos_token_id=EOS,
        eos_probability=0.02,
    )
    acceptance = ACCEPTANCE if case.drafter == MODEL else 0.0
    return SimulatedExecutor(config, model, draft_acceptance=acceptance, verify_every=1), config


def _computing(place: str, case: Case, checkpoints: Checkpoints) -> tuple[Executor, EngineConfig]:
    given = LIMITS | PLACES[place].options | case.options
    ranks = given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1)
    options = ExecutorOptions(
        model_folder=checkpoints.model(case),
        draft_model=checkpoints.draft(case) if case.drafter == MODEL else None,
        draft_heads=checkpoints.heads(case.drafter) if case.drafter in HEADS else None,
        max_draft_tokens=_max_drafts(case),
        # More ranks than cores are served where a thread for each is asked for.
        num_threads=ranks,
        kv_peer_memory=HOST_BYTES,
        kv_peer_direct="off",
        **given,
    )
    executor, config, _ = build_executor(options, lambda phase, done, total: None)
    return executor, config
