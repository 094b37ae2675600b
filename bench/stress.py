"""Makes ordering faults frequent in an executor on a GPU: randomly delayed streams, memory that is
never zero by chance, KV blocks that nothing may write."""

from __future__ import annotations

import random
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Executor
from headwater.engine_core.executors.step_executor import StepExecutor

MAX_DELAY_CYCLES = 2_000_000
"""Largest delay, about a millisecond, as long as a step."""
DELAY_CHANCE = 0.2
NUM_GUARD_BLOCKS = 50
CANARY = 1.5
"""Number of KV blocks at the end of the cache that engines do not get, and their contents."""


class GuardWritten(Exception):
    """A KV block that belongs to no engine was written."""

    def __init__(self, blocks: list[int]) -> None:
        super().__init__(f"written although no request can hold them: KV blocks {blocks}")


class Stress:
    """Stress of one executor. Without effect unless it is on and entered."""

    def __init__(self, executor: Executor, *, is_on: bool, seed: int) -> None:
        self._rng = random.Random(seed)
        self._executor: StepExecutor[Any, Any] | None = None
        if is_on and isinstance(executor, StepExecutor) and not executor.computes_at_once:
            self._executor = executor
        self._streams: list[torch.cuda.Stream] = []

    @property
    def _guard(self) -> torch.Tensor:
        """Guard blocks [layers, 2, guard blocks, Hk, block_size, D]."""
        assert self._executor is not None
        return self._executor.kv_caches[0][:, :, -NUM_GUARD_BLOCKS:]

    def __enter__(self) -> None:
        if self._executor is not None:
            self._streams = [*_streams(self._executor), torch.cuda.default_stream()]
            # Memory that torch allocates without a value is NaN, or the largest integer.
            torch.use_deterministic_algorithms(True, warn_only=True)
            self._guard.fill_(CANARY)
            torch.cuda.synchronize()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._streams = []
        torch.use_deterministic_algorithms(False)

    def engine_config(self, config: EngineConfig) -> EngineConfig:
        """The config of engines over the executor: without the guard blocks."""
        return (
            config
            if self._executor is None
            else replace(config, num_blocks=config.num_blocks - NUM_GUARD_BLOCKS)
        )

    def check(self) -> None:
        """Checks the guard blocks; call it with nothing in flight. Raises `GuardWritten`."""
        if self._executor is not None and (self._guard != CANARY).any():
            written = (self._guard != CANARY).transpose(0, 2).flatten(1).any(1)
            raise GuardWritten(written.nonzero()[:, 0].tolist())

    def before_step(self) -> None:
        """Delays each stream with some chance."""
        for stream in self._streams:
            if self._rng.random() < DELAY_CHANCE:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self._rng.randrange(MAX_DELAY_CYCLES))  # type: ignore[no-untyped-call]  # torch ships it so


def _streams(executor: StepExecutor[Any, Any]) -> list[torch.cuda.Stream]:
    """Streams of the launches of this executor and of its swapper."""
    owners = [executor._device, executor._tiers]
    attributes = [value for owner in owners for value in vars(owner).values()]
    return [value for value in attributes if isinstance(value, torch.cuda.Stream)]
