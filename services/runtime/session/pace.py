"""Bounds how far an engine may run ahead of its gateways: the more streams, the fewer tokens each.

Credit bounds the tokens that a stream may have on their way to a thousand; for hundreds of streams
together that is seconds of work for a gateway, behind which every other stream's tokens wait.
Credit is passed on to the engine in parts, as tokens leave for the gateway, so that the streams of
an engine together have a fraction of a second's work on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOKENS_AHEAD = 8192
"""Number of tokens that all streams of an engine together may be ahead, if that leaves each of them
LEAST_AHEAD."""
LEAST_AHEAD = 32
"""Number of tokens that one stream may be ahead: more than engines plan at once, and than they
compute until more credit is there."""


@dataclass(slots=True)
class _Paced:
    withheld: int
    """Credit from the gateway that the engine has not been given."""
    ahead: int
    """Credit that the engine was given, less the tokens that left for the gateway."""


class Pace:
    """Paced streams, by the engine's stream ids. Other streams get all of their credit at once."""

    def __init__(self) -> None:
        self._streams: dict[int, _Paced] = {}

    def open(self, numbers: Sequence[int], credit: int) -> int:
        """Returns the credit that each of a request's new streams begins with."""
        self._streams.update({number: _Paced(0, 0) for number in numbers})
        first = min(credit, self._window)
        for number in numbers:
            self._streams[number] = _Paced(credit - first, first)
        return first

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def granted(self, number: int, tokens: int) -> int:
        """Takes credit from the gateway; returns the part that the engine is given now."""
        if (paced := self._streams.get(number)) is None:
            return tokens
        paced.withheld += tokens
        return self._due(paced)

    def on_delivered(self, number: int, tokens: int) -> int:
        """Notes that tokens have left for the gateway; returns the credit that the engine is given
        now."""
        if (paced := self._streams.get(number)) is None:
            return 0
        paced.ahead = max(0, paced.ahead - tokens)
        return self._due(paced)

    @property
    def _window(self) -> int:
        return max(LEAST_AHEAD, TOKENS_AHEAD // max(1, len(self._streams)))

    def _due(self, paced: _Paced) -> int:
        window = self._window
        if not paced.withheld or paced.ahead > window // 2:
            return 0
        given = min(paced.withheld, window - paced.ahead)
        paced.withheld -= given
        paced.ahead += given
        return given
