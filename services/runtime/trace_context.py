"""W3C trace context: the trace that a request belongs to. Pure; knows nothing about spans and
collectors."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span in a form that other processes can use as parent."""

    trace_id: str
    """Id of the trace, 32 hex digits."""
    span_id: str
    """Id of the span, 16 hex digits."""
    is_sampled: bool = False
    tracestate: str = ""
    """State of vendors, passed on as it came."""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """Context of a header; None for a traceparent that is not of W3C's version 00, or of a
        later one that begins like it."""
        match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if (
            version == "ff"
            or (version == "00" and more)
            or not int(trace_id, 16)
            or not int(span_id, 16)
        ):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), tracestate)

    @classmethod
    def fresh(cls) -> TraceContext:
        """Context of a trace that is not collected: its id joins log lines all the same."""
        return cls(f"{random.getrandbits(128) or 1:032x}", f"{random.getrandbits(64) or 1:016x}")

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"
