"""What a machine that others use takes from a bound in seconds: how long it let a process wait that
asked for nothing but to be woken."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from types import TracebackType

from tests.polling import holds_within

_WAKE = struct.Struct("dd")
"""Two readings of `time.monotonic`: when the observer was to be woken, and when it was."""
_OBSERVER = """
import struct, sys, time
woken = time.monotonic()
while True:
    # The due time counts from the last wake, so that a pause between two sleeps counts too.
    due = woken + 0.005
    time.sleep(max(0.0, due - time.monotonic()))
    woken = time.monotonic()
    sys.stdout.buffer.raw.write(struct.pack("dd", due, woken))
"""


class MachineStalls:
    """A process that sleeps, for as long as the context lasts. What it waits beyond its sleep, it
    waits for a core, and so does every other process."""

    def __enter__(self) -> MachineStalls:
        self._wakes = tempfile.TemporaryFile()
        self._observer = subprocess.Popen(
            [sys.executable, "-IS", "-c", _OBSERVER], stdout=self._wakes
        )
        assert holds_within(lambda: self._read() != [], 60), "the observer has not started"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._observer.kill()
        self._observer.wait()
        self._wakes.close()

    @property
    def pid(self) -> int:
        return self._observer.pid

    def seconds_between(self, began: float, ended: float) -> float:
        """Seconds of a stretch of `time.monotonic` in which the observer waited for a core."""
        assert holds_within(lambda: self._read()[-1][1] > ended, 60), "the observer was not woken"
        return sum(max(0.0, min(woken, ended) - max(due, began)) for due, woken in self._read())

    def _read(self) -> list[tuple[float, float]]:
        size = os.fstat(self._wakes.fileno()).st_size
        # The observer writes at the position that it shares with this process, which therefore
        # stays.
        return list(
            _WAKE.iter_unpack(os.pread(self._wakes.fileno(), size // _WAKE.size * _WAKE.size, 0))
        )
