from __future__ import annotations

import pytest

from headwater.services.runtime.trace_context import TraceContext

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_traceparent_is_read_and_written_the_same(flags: str) -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert context == TraceContext(TRACE, SPAN, is_sampled=flags == "01")
    assert context.traceparent == f"00-{TRACE}-{SPAN}-{flags}"


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert TraceContext.parse(f"cc-{TRACE}-{SPAN}-09-what-the-future-brings") == TraceContext(
        TRACE, SPAN, True
    )


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_what_the_standard_does_not_know_is_no_trace(traceparent: str) -> None:
    assert TraceContext.parse(traceparent) is None


def test_a_fresh_trace_is_not_sampled() -> None:
    fresh = TraceContext.fresh()
    assert TraceContext.parse(fresh.traceparent) == fresh
    assert not fresh.is_sampled
    assert fresh != TraceContext.fresh()
