"""How far an engine may run ahead of what its gateways have taken: less a stream, the more streams there are.

Credit bounds what a stream may have on its way, a thousand tokens; for hundreds of streams together that is seconds of
work for a gateway, behind which every other stream's tokens wait. Credit is passed on to the engine in parts, as tokens
leave for the gateway, so that all streams of an engine together have a tenth of a second's work on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SECONDS_AHEAD = 0.1
"""Of work for the gateways, at the pace at which they take tokens. Many times the way to the engine and back."""
TOKENS_AHEAD = 2048
"""Of all streams of an engine together, where that is more, or where no pace is known."""
LEAST_AHEAD = 8
"""Of a stream: more than engines have in flight, and than they compute until more credit is there."""


@dataclass(slots=True)
class _Paced:
    withheld: int
    """Credit of the gateway's that the engine has not been given."""
    ahead: int
    """Credit that the engine was given, less what the gateway was told."""


class Pace:
    """By the numbers that an engine knows its streams by. Those it does not know are not paced."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self._streams: dict[int, _Paced] = {}
        self._clock = clock
        self._num_told, self._counted_since = 0, clock()
        self._tokens_ahead = TOKENS_AHEAD

    def open(self, numbers: Sequence[int], credit: int) -> int:
        """What each of a request's new streams begins with."""
        self._streams.update({number: _Paced(0, 0) for number in numbers})
        first = min(credit, self._window)
        for number in numbers:
            self._streams[number] = _Paced(credit - first, first)
        return first

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def granted(self, number: int, tokens: int) -> int:
        """What of a gateway's credit the engine is given now."""
        if (paced := self._streams.get(number)) is None:
            return tokens
        paced.withheld += tokens
        return self._due(paced)

    def told(self, number: int, tokens: int) -> int:
        """What the engine is given when tokens have left for the gateway."""
        if (paced := self._streams.get(number)) is None:
            return 0
        self._count(tokens)
        paced.ahead = max(0, paced.ahead - tokens)
        return self._due(paced)

    def _count(self, tokens: int) -> None:
        """Measures how many tokens leave in `SECONDS_AHEAD`."""
        self._num_told += tokens
        if (elapsed := self._clock() - self._counted_since) >= SECONDS_AHEAD:
            self._tokens_ahead = max(TOKENS_AHEAD, int(self._num_told * SECONDS_AHEAD / elapsed))
            self._num_told, self._counted_since = 0, self._counted_since + elapsed

    @property
    def _window(self) -> int:
        return max(LEAST_AHEAD, self._tokens_ahead // max(1, len(self._streams)))

    def _due(self, paced: _Paced) -> int:
        window = self._window
        if not paced.withheld or paced.ahead > window // 2:
            return 0
        given = min(paced.withheld, window - paced.ahead)
        paced.withheld -= given
        paced.ahead += given
        return given
