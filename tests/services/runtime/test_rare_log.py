"""A log of what clients can bring about at any rate."""

from __future__ import annotations

from structlog.testing import capture_logs

from headwater.services.runtime.rare_log import MAX_KINDS, RareLog


def test_a_kind_has_one_line_a_minute_and_the_next_one_counts_those_left_out() -> None:
    now = 0.0
    log = RareLog(lambda: now)
    with capture_logs() as lines:
        for now in (0.0, 1.0, 59.0, 60.0, 61.0):
            log.add("turn not kept", conversation=f"c{now}")
    assert [(line["conversation"], line.get("left_out")) for line in lines] == [
        ("c0.0", None),
        ("c60.0", 2),
    ]


def test_other_kinds_have_lines_of_their_own_and_their_number_is_bounded() -> None:
    log = RareLog(lambda: 0.0)
    with capture_logs() as lines:
        for number in range(MAX_KINDS + 1):
            log.add("out of reach", str(number))
        log.add("out of reach", str(MAX_KINDS))
    assert len(lines) == MAX_KINDS + 1
    assert len(log._logged_at) <= MAX_KINDS
