"""A device that computes plans where they are submitted. On a CPU nothing runs beside the engine: a
thread for the model would take a core from the model's own threads whenever the engine plans, and
they would wait for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ...config import EngineConfig
from ...executor import Executor
from .warmup_plans import seconds_of_a_step


class EagerDevice:
    """See `Device`."""

    computes_at_once = True

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._scope = nullcontext()

    def launching(self) -> AbstractContextManager[object]:
        return self._scope

    def end(self, step: int) -> None:
        pass

    def is_done(self, step: int) -> bool:
        return True

    def wait(self, step: int, *, spins: bool) -> None:
        pass

    def finish(self) -> None:
        pass

    def warm_up(self, executor: Executor) -> float:
        return seconds_of_a_step(executor, self._config, self._vocab_size)
