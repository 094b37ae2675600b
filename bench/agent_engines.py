"""Engines for `headwater bench agents`: simulated ones with a clock of their own, and those of a
device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Executor, releasable_of
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.options import ExecutorOptions

from .agent_load import FIRST_TOKEN_ID, VOCAB_SIZE, Clock, RealClock, Run, VirtualClock

BLOCK_SIZE = 64
MAX_MODEL_LEN = 40_960
ATTENTION_PIVOT = 23_500
TIMING = SimulatedTiming(
    step_seconds=0.006,
    seconds_per_prefill_token=1 / 24_000,
    seconds_per_read_token=3.7e-8,
)
"""Times of an 8B model on an H200: a step reads the weights, a row its keys and values."""
Open = Callable[[str, int], tuple[Engine, Executor, EngineConfig, Clock]]
"""Opens an engine with an order of eviction and room for so many tokens in host memory."""


def simulated(run: Run, device_tokens: int) -> Open:
    """Simulated engines, each with a clock of its own."""
    num_blocks = device_tokens // BLOCK_SIZE

    def open_engine(
        eviction: str, host_tokens: int
    ) -> tuple[Engine, Executor, EngineConfig, Clock]:
        clock = VirtualClock()
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=1 + num_blocks,
            num_host_blocks=host_tokens // BLOCK_SIZE,
            max_model_len=min(MAX_MODEL_LEN, num_blocks * BLOCK_SIZE),
            max_num_seqs=run.num_sessions,
            max_num_batched_tokens=8192,
            long_prefill_chunk=2048,
            eviction=eviction,
            attention_pivot=ATTENTION_PIVOT,
        )
        model = SimulatedModel(vocab_size=VOCAB_SIZE, first_token_id=FIRST_TOKEN_ID)
        executor = SimulatedExecutor(
            config, model, TIMING, verify_every=1 << 30, clock=clock.now, sleep=clock.sleep
        )
        return Engine(config, executor, clock=clock.now), executor, config, clock

    return open_engine


def on_device(folder: Path, options: dict[str, object], bytes_per_token: int) -> Open:
    """Engines of a model folder, on a device."""

    def open_engine(
        eviction: str, host_tokens: int
    ) -> tuple[Engine, Executor, EngineConfig, Clock]:
        asked = ExecutorOptions(
            model_folder=folder,
            load_format="dummy",
            kv_swap_memory=host_tokens * bytes_per_token,
            **options,  # type: ignore[arg-type]  # flags, checked by typer
        )
        executor, config, _ = build_executor(asked, lambda phase, done, total: None)
        config = replace(config, eviction=eviction)
        engine = Engine(config, executor, memory=releasable_of(executor))
        while executor.prepare():
            pass
        return engine, executor, config, RealClock()

    return open_engine
