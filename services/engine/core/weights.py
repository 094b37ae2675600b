"""Replacement of the core's weights: loaded by a thread beside the steps, adopted between two
steps."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from headwater.engine_core.config import ConfigError
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import NewWeights, ReplaceableWeights
from headwater.engine_core.system.ring import RingWriter

from .messages import (
    DropWeights,
    LoadWeights,
    OfWeights,
    ReplaceWeights,
    WeightsLoaded,
    WeightsReplaced,
    encode,
)

LOADING_SECONDS = 0.01
"""Seconds between two looks of an idle core at weights that are being loaded."""


class CoreWeights:
    def __init__(
        self, engine: Engine, weights: ReplaceableWeights | str, reports: RingWriter
    ) -> None:
        """`weights`: the executor's; a text says why they may not be replaced."""
        self._engine = engine
        self._weights = weights
        self._reports = reports
        self._thread = ThreadPoolExecutor(1, "weights")
        self._loaded: SimpleQueue[tuple[int, NewWeights | str]] = SimpleQueue()
        self._num_loading = 0
        self._dropped: set[int] = set()
        """Numbers of weights that are not wanted while they are being loaded."""
        self._kept: dict[int, NewWeights] = {}
        """Loaded weights by the number that names them."""
        self._due: ReplaceWeights | None = None
        self._due_since = 0.0

    def apply(self, command: OfWeights) -> None:
        match command:
            case LoadWeights(number, folder):
                self._num_loading += 1
                self._thread.submit(self._load, number, Path(folder))
            case DropWeights(number):
                if self._due is not None and number == self._due.number:
                    return
                if self._kept.pop(number, None) is None and self._num_loading:
                    self._dropped.add(number)
            case ReplaceWeights(number):
                if number in self._kept and self._due is None:
                    self._due = command
                    self._due_since = time.monotonic()
                else:
                    error = "the weights are not loaded, or others are just taking their place"
                    self._reports.write(encode(WeightsReplaced(number, error=error)))

    def settle(self) -> None:
        """Takes over loaded weights, and continues a replacement. To be called between steps."""
        while self._num_loading:
            try:
                number, found = self._loaded.get_nowait()
            except Empty:
                break
            self._num_loading -= 1
            self._note_loaded(number, found)
        if self._due is None:
            return
        if not self._engine.is_asleep:
            self._engine.pause()
            return
        self._replace(self._due)
        self._due = None

    def pause(self, seconds: float | None) -> float | None:
        """Seconds that an idle core may sleep which may sleep so long otherwise; None: until it is
        called."""
        if self._due is not None:
            # The engine has paused: no call would wake the core to finish the replacement.
            return 0.0
        if not self._num_loading:
            return seconds
        return LOADING_SECONDS if seconds is None else min(seconds, LOADING_SECONDS)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _replace(self, due: ReplaceWeights) -> None:
        assert not isinstance(self._weights, str)
        adopt = partial(self._weights.adopt, self._kept.pop(due.number))
        self._engine.replace_weights(adopt, ends_requests=due.ends_requests)
        seconds = time.monotonic() - self._due_since
        self._reports.write(encode(WeightsReplaced(due.number, seconds)))

    def _note_loaded(self, number: int, found: NewWeights | str) -> None:
        if number in self._dropped:
            self._dropped.remove(number)
        elif isinstance(found, str):
            self._reports.write(encode(WeightsLoaded(number, error=found)))
        else:
            self._kept[number] = found
            self._reports.write(encode(WeightsLoaded(number, found.numerics_id)))

    def _load(self, number: int, folder: Path) -> None:
        """Loads on a thread of its own."""
        try:
            if isinstance(self._weights, str):
                found: NewWeights | str = self._weights
            else:
                found = self._weights.load(folder)
        except (ConfigError, OSError) as error:
            found = str(error)
        except Exception as error:
            # An unforeseen fault of a load refuses the weights; the engine goes on.
            found = f"{type(error).__name__}: {error}"
        self._loaded.put((number, found))
