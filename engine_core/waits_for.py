"""Events that an engine's next step waits for; the loop that steps the engine sleeps by them."""

from __future__ import annotations

from enum import Enum, auto


class WaitsFor(Enum):
    NOTHING = auto()
    """A step has something to do."""
    WORK = auto()
    """A request, or another call of the engine."""
    BLOCKS = auto()
    """Blocks that come from a source or are lent. Steps look at them, also while the device
    computes."""
    MASKS = auto()
    """Masks of rows that are held, or the device. Steps look how long it is better to wait."""
    DEVICE = auto()
    """The device alone: no step is due before it is done, or the engine is called."""
    TIME = auto()
    """The end of `Engine.pause_seconds`. The engine has no work."""
