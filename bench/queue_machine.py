"""Engines for the benchmark of queue policies, each with its clock: a simulated executor with
measured costs, or a model with random weights."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.options import ExecutorOptions
from headwater.services.engine.core.rates import MeasuredExecutor

from .queue_loads import NUM_IDS
from .queue_run import Clock, RealClock, VirtualClock
from .workloads import MODELS, TINY

MAX_MODEL_LEN = 131_072
BLOCK_SIZE = 64
H200_8B = SimulatedTiming(
    step_seconds=4.1e-3,
    seconds_per_request=3.5e-5,
    seconds_per_prefill_token=2.55e-5,
    seconds_per_read_token=3.5e-8,
)
"""Qwen3-8B in bfloat16 on an H200: O3 (one row), O2 (512 rows), O5 (prompts of 8,192 tokens) and O8
(16 rows of 30,000 tokens) of docs/benchmarks/engine.md, 2026-11-27."""
H200_8B_TOKENS = 745_000
"""Tokens whose keys and values fit beside the weights."""


class Machine:
    """Makes engines, each with a clock: of a simulated executor, or of one model's."""

    def __init__(self, model: str, device: str, max_num_seqs: int, budget: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self._real: tuple[MeasuredExecutor, EngineConfig] | None = None
        if model:
            self._real = self._built(model, device)

    @property
    def max_model_len(self) -> int:
        return MAX_MODEL_LEN if self._real is None else self._real[1].max_model_len

    def engine(self, policy: str) -> tuple[Engine, Clock]:
        if self._real is not None:
            executor, config = self._real
            return Engine(replace(config, policy=policy), executor), RealClock()
        clock = VirtualClock()
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=H200_8B_TOKENS // BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self._max_num_seqs,
            spare_rows=8,
            max_num_batched_tokens=self._budget,
            policy=policy,
        )
        simulated = SimulatedExecutor(
            config,
            SimulatedModel(vocab_size=NUM_IDS),
            H200_8B,
            verify_every=1 << 30,
            clock=clock,
            sleep=clock.sleep,
        )
        return Engine(config, simulated, clock=clock), clock

    def _built(self, model: str, device: str) -> tuple[MeasuredExecutor, EngineConfig]:
        with tempfile.TemporaryDirectory(prefix="headwater-model-") as folder:
            config = TINY if model == "tiny" else MODELS[model]
            Path(folder, "config.json").write_text(json.dumps(config))
            options = ExecutorOptions(
                model_folder=Path(folder),
                device=device,
                load_format="dummy",
                block_size=BLOCK_SIZE,
                max_num_seqs=self._max_num_seqs,
                max_num_batched_tokens=self._budget,
                max_model_len=config["max_position_embeddings"],
            )
            executor, engine_config, _ = build_executor(options, lambda phase, done, total: None)
        longest = executor.warm_up()
        while executor.prepare():
            pass
        measured = MeasuredExecutor(executor, prefill_seconds=longest / self._budget)
        return measured, engine_config
