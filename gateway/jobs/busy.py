"""Tells which answers of the gateway's REST surface mean that work has to wait, and how long it
waits."""

from __future__ import annotations

import msgspec

from ..tenancy.grant import LIMIT_TOO_LOW, OUT_OF_BUDGET
from .in_process import Reply

BUSY = (429, 503)
FINAL_CODES = (OUT_OF_BUDGET, LIMIT_TOO_LOW)
"""Codes of answers that end the work: no waiting helps, or none but for the budget's next
period."""
MAX_FAULTS = 3
"""Number of 5xx answers after which the last one becomes the result; answers that only report a
busy cluster do not count."""
PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds between tries; the last pause repeats."""
PATIENCE = 3
"""Number of tries of what cannot be served now, when the work is taken for the first time; later it
is one."""
FIRST_REST_SECONDS = 0.5
MAX_REST_SECONDS = 15.0
"""Longest pause of such work while other work runs; pauses double up to it."""


class Busy(Exception):
    """The work cannot be done now."""


class _Refusal(msgspec.Struct):
    code: str = ""


class _Envelope(msgspec.Struct):
    error: _Refusal


_envelopes = msgspec.json.Decoder(_Envelope)


def is_busy(reply: Reply) -> bool:
    """Whether the same request may be served later."""
    if reply.status not in BUSY:
        return False
    try:
        return _envelopes.decode(reply.body).error.code not in FINAL_CODES
    except msgspec.DecodeError:
        return True


def patience_of(num_deliveries: int) -> int:
    """Number of tries before the work rests."""
    return PATIENCE if num_deliveries == 1 else 1


def rest_seconds(num_deliveries: int) -> float:
    return float(min(MAX_REST_SECONDS, FIRST_REST_SECONDS * 2 ** min(num_deliveries - 1, 10)))
