"""Errors that no code foresees: a traceback a minute for each kind, a line for each error."""

from __future__ import annotations

import structlog

from headwater.services.runtime.unforeseen import SECONDS, UnforeseenLog


def deep(levels: int) -> None:
    if levels:
        deep(levels - 1)
    else:
        raise RecursionError("too deep")


def test_a_traceback_is_written_once_a_minute_for_each_kind() -> None:
    now = 0.0
    log = UnforeseenLog(clock=lambda: now)

    def fail(work: object) -> None:
        try:
            work()  # type: ignore[operator] # it is a function in all that is called
        except Exception as fault:
            log.add(fault, method="POST")

    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            fail(lambda: deep(500))
        fail(lambda: 1 / 0)
        now = SECONDS
        fail(lambda: deep(500))
    assert [("exc_info" in line, line.get("error")) for line in lines] == [
        (True, None),
        (False, "RecursionError: too deep"),
        (False, "RecursionError: too deep"),
        (True, None),
        (True, None),
    ]
    assert all(line["method"] == "POST" for line in lines)
    assert len(str(lines[1])) < 500
