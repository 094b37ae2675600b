"""Decides when a core has hung: it owes a message and sends none. Knows of messages only whether
they are calls to sleep and to wake."""

from __future__ import annotations

import asyncio

from headwater.engine_core.sleep import SleepState
from headwater.engine_core.step_output import EngineLoad

from .messages import Command, Sleep, Wake

PATIENCE = 10
"""Times the slowest step so far, which is no silence to speak of; and of the limit, while the core
starts: to load weights takes longer than any step."""
DOUBT = 2
"""Times what a step was expected to take at most; a step of the whole budget is rare, and mostly
quicker than that."""
TICK_SECONDS = 1.0
MOVING_SECONDS = 600.0
"""Silence that is allowed while a core gives its device's memory back or brings it back: hundreds
of GB."""


class CoreWatch:
    """Detects a hung core: after each command the core must report until it reports that it is
    idle. Silence is counted in ticks of this process, so a machine that stalls both does not make
    the core suspect."""

    def __init__(self, limit: float) -> None:
        """`limit` in seconds; 0: none."""
        self._limit = limit
        self._owes = True
        self._has_started = False
        self._longest_step = self._expected_step = 0.0
        self._moving_call = 0
        """The call to sleep or to wake that is under way; 0: none is."""
        self.silence = 0.0
        """Seconds for which the core owes a message."""

    @property
    def allowed(self) -> float:
        """Seconds of silence."""
        if not self._has_started:
            return PATIENCE * self._limit
        moving = MOVING_SECONDS if self._moving_call else 0.0
        return max(self._limit, PATIENCE * self._longest_step, DOUBT * self._expected_step, moving)

    @property
    def may_be_in_step(self) -> bool:
        """Whether the silence is no longer than a slow step explains."""
        return self.silence <= TICK_SECONDS + DOUBT * max(self._longest_step, self._expected_step)

    def started(self, longest_step: float) -> None:
        """The core serves; `longest_step`: seconds that a step is expected to take at most."""
        self._has_started = True
        self._expected_step = longest_step

    def commanded(self) -> None:
        """Notes that the core was sent a command."""
        if not self._owes:
            self._owes = True
            self.silence = 0.0

    def sent(self, command: Command) -> None:
        """Notes a command that is about to be sent."""
        if isinstance(command, Sleep | Wake):
            self._moving_call = command.call

    def note_load(self, load: EngineLoad) -> None:
        """Notes whether the core has done what it was last called for."""
        is_settled = load.sleep_state != SleepState.FALLING_ASLEEP
        if is_settled and load.sleep_call >= self._moving_call:
            self._moving_call = 0

    def on_message(self, *, is_idle: bool, step_seconds: float = 0.0) -> None:
        """Notes a message of the core: that it is idle, or the result of a step of so many
        seconds."""
        # Seconds that this process did not live through either (a paused machine's) say nothing
        # about steps.
        self._longest_step = max(self._longest_step, min(step_seconds, self.silence + TICK_SECONDS))
        self._owes = not is_idle
        self.silence = 0.0

    async def until_hung(self) -> None:
        """Returns when the core has been silent for longer than is allowed."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.is_hung_after(TICK_SECONDS):
                return

    def is_hung_after(self, seconds: float) -> bool:
        """Whether the core counts as hung if it reports nothing for `seconds` more."""
        if self._owes:
            self.silence += seconds
        return self._limit > 0 and self.silence > self.allowed
