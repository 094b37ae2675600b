"""Stretches of steps in which rows have drafts, and the time that the drafts saved or cost."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from .realized_gain import PlainSteps, RealizedGain


class Mode(Enum):
    PLAIN = auto()
    """Rows have no drafts."""
    WAITING = auto()
    """Rows wait for their results, and drafts are made on the host."""
    AHEAD = auto()
    """Rows run ahead of their results, and the executor drafts."""


class Trials:
    """One stretch at a time, in a mode that is not plain."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.mode = Mode.PLAIN
        self.expected = 1.0
        """Gain that was expected of the last step that was planned with drafts."""
        self._plain = PlainSteps(clock)
        self._realized: dict[Mode, RealizedGain] = {
            mode: RealizedGain(self._plain) for mode in (Mode.WAITING, Mode.AHEAD)
        }

    def promised(self, mode: Mode, gain: float) -> float:
        """The gain to act on before a stretch begins; see `RealizedGain`."""
        return self._realized[mode].promised(gain)

    def factor(self, mode: Mode) -> float:
        return self._realized[mode].factor

    def may_begin(self, num_rows: int) -> bool:
        """Whether enough steps of so many rows were seen without drafts."""
        return not self._plain.lacks(num_rows)

    def begin(self, mode: Mode, gain: float) -> None:
        """A stretch begins, of which this gain is expected."""
        self.mode = mode
        self.expected = gain
        self._plain.interrupt()
        self._realized[mode].begin(gain)

    def end(self) -> None:
        """Ends the running stretch, if there is one."""
        if self.mode is not Mode.PLAIN:
            self._realized[self.mode].end()
            self.mode = Mode.PLAIN

    def note(self, num_rows: int, num_tokens: int) -> bool:
        """Notes a settled step. Returns whether the mode that is tried may go on."""
        seconds = self._plain.elapsed()
        if self.mode is not Mode.PLAIN:
            realized = self._realized[self.mode]
            return realized.note(self.expected, num_rows, num_tokens, seconds)
        self._plain.note(num_rows, seconds)
        for realized in self._realized.values():
            realized.note_plain(num_rows, seconds)
        return True
