"""Engines for `headwater bench agents`: simulated ones with a clock of their own, and those of a
device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
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
Open = Callable[[str, int], tuple[Engine, EngineConfig, Clock]]
"""Opens an engine with an order of eviction and room for so many tokens in host memory."""


def simulated(run: Run, device_tokens: int) -> Open:
    """Simulated engines, each with a clock of its own."""
    num_blocks = device_tokens // BLOCK_SIZE

    def open_engine(eviction: str, host_tokens: int) -> tuple[Engine, EngineConfig, Clock]:
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
        return Engine(config, executor, clock=clock.now), config, clock

    return open_engine


@contextmanager
def on_device(
    folder: Path, options: dict[str, object], bytes_per_token: int, hosts: Sequence[int]
) -> Iterator[Open]:
    """Engines of a model folder, one after another on one executor, each with an empty cache.
    `hosts`: rooms for tokens in host memory that are asked for."""
    asked = ExecutorOptions(
        model_folder=folder,
        load_format="dummy",
        kv_swap_memory=max(hosts) * bytes_per_token,
        **options,  # type: ignore[arg-type]  # flags, checked by typer
    )
    executor, built, _ = build_executor(asked, lambda phase, done, total: None)
    while executor.prepare():
        pass

    def open_engine(eviction: str, host_tokens: int) -> tuple[Engine, EngineConfig, Clock]:
        num_host_blocks = min(host_tokens // built.block_size, built.num_host_blocks)
        config = replace(built, eviction=eviction, num_host_blocks=num_host_blocks)
        return Engine(config, executor), config, RealClock()

    try:
        yield open_engine
    finally:
        executor.close()
