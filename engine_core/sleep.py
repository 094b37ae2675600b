"""Sleep of an engine: its states, the memory that it gives back meanwhile, and the seconds that
falling asleep and waking take.

Knows nothing about requests: the engine preempts them first, and brings nothing back but memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from .executor import MemoryShort, ReleasableMemory
from .step_output import EngineLoad


class SleepState(StrEnum):
    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    """State in which no step is planned any more, and steps in flight and copies of blocks end."""
    ASLEEP = "asleep"


class Sleep:
    def __init__(
        self,
        memory: ReleasableMemory | None,
        clock: Callable[[], float],
        num_held_bytes: int = 0,
    ) -> None:
        """`memory`: None: the engine was not started to sleep. `num_held_bytes`: of weights that a
        holder has until they are given back."""
        self.state = SleepState.AWAKE
        self._can_sleep = memory is not None
        self._memory: ReleasableMemory = NoMemory() if memory is None else memory
        self._clock = clock
        self._num_held = num_held_bytes
        self._begun_at = 0.0
        self._num_sleeps = 0
        self._num_released = 0
        """Bytes, while asleep."""
        self._sleep_seconds = self._wake_seconds = 0.0
        self._problem = ""
        self._call = 0
        self._is_wanted_awake = True
        self._is_released = False

    @property
    def is_awake(self) -> bool:
        return self.state is SleepState.AWAKE

    @property
    def drops_cache(self) -> bool:
        """Whether the KV cache's memory is given back as well."""
        return not self._memory.keeps_cache

    def begin(self, call: int) -> None:
        """Begins to put the engine to sleep; no effect where it is asleep."""
        self._call = call
        self._is_wanted_awake = False
        # Clears the failure of an earlier call to wake.
        self._problem = ""
        if self.state is SleepState.ASLEEP and not self._is_released:
            self._begun_at = self._clock()
            self._release()
        self._fall()

    def pause(self) -> None:
        """Puts the engine to sleep as `begin` does, but keeps its memory. `resume` ends it."""
        self._fall()

    def release(self) -> None:
        """Gives the memory back, but in a pause: nothing reads or writes it any more."""
        assert self.state is SleepState.FALLING_ASLEEP
        self.state = SleepState.ASLEEP
        if not self._is_wanted_awake:
            self._release()

    def resume(self) -> None:
        """Ends a pause, unless the engine was called to sleep meanwhile."""
        if self._is_wanted_awake:
            self.end(self._call)

    def _fall(self) -> None:
        if self.is_awake:
            self.state = SleepState.FALLING_ASLEEP
            self._begun_at = self._clock()

    def _release(self) -> None:
        self._num_released = self._memory.release()
        self._is_released = True
        self._num_sleeps += 1
        self._sleep_seconds = self._clock() - self._begun_at

    def end(self, call: int) -> None:
        """Wakes the engine, or keeps it awake while it was falling asleep. Where the device lacks
        memory it stays asleep and reports why."""
        self._call = call
        self._is_wanted_awake = True
        if self._is_released:
            begun_at = self._clock()
            try:
                self._memory.restore()
            except MemoryShort as short:
                self._problem = str(short)
                self._is_wanted_awake = False
                return
            self._wake_seconds = self._clock() - begun_at
            self._num_released = 0
            self._is_released = False
        self._problem = ""
        self.state = SleepState.AWAKE

    def describe(self, load: EngineLoad) -> None:
        load.sleep_state = self.state.value
        load.can_sleep = self._can_sleep
        load.num_sleeps = self._num_sleeps
        load.sleep_seconds = self._sleep_seconds
        load.wake_seconds = self._wake_seconds
        load.num_releasable_bytes = self._memory.num_bytes
        load.num_released_bytes = self._num_released
        load.num_held_bytes = 0 if self._is_released else self._num_held
        load.sleep_problem = self._problem
        load.sleep_call = self._call


class NoMemory:
    """See `ReleasableMemory`: memory of an engine that was not started to sleep."""

    keeps_cache = True
    num_bytes = 0

    def release(self) -> int:
        return 0

    def restore(self) -> None:
        pass
