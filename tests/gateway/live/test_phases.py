"""Phases of requests in the console's table: those of their explanation, also while they last."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CLIENT = Path(__file__).parents[1] / "js" / "phases_client.js"
NONE = dict.fromkeys(("prepare", "replica", "queue", "engine_queue", "to_first_token"))


def shown(state: str, **seconds: float) -> dict[str, float]:
    """Phases that a row of the table shows, in tenths of a second."""
    if shutil.which("node") is None:
        pytest.skip("node is missing")
    row: dict[str, Any] = {"state": state, "seconds": NONE | {"route": 0.0} | seconds}
    done = subprocess.run(
        ["node", str(CLIENT), json.dumps(row)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {name: round(10 * each, 6) for name, each in json.loads(done.stdout).items()}


def test_a_request_that_was_long_prepared_was_not_queued() -> None:
    assert shown(
        "done",
        prepare=5.0,
        replica=0.0,
        queue=0.1,
        route=0.1,
        engine_queue=0.2,
        to_first_token=6.0,
        total=7.5,
    ) == {
        "prepare": 50,
        "queue": 1,
        "route": 1,
        "engine queue": 2,
        "prefill": 6,
        "decode": 15,
    }


@pytest.mark.parametrize(
    ("state", "seconds", "phases"),
    [
        ("preparing", {"total": 2.0}, {"prepare": 20}),
        (
            "waiting for an engine",
            {"prepare": 0.5, "total": 2.0},
            {"prepare": 5, "engine start": 15},
        ),
        ("queued", {"prepare": 0.5, "replica": 0.5, "total": 2.0}, {"queue": 10}),
        ("prefill", {"prepare": 0.5, "replica": 0.0, "queue": 0.5, "total": 2.0}, {"prefill": 10}),
    ],
)
def test_the_phase_that_a_request_is_in_has_lasted_until_now(
    state: str, seconds: dict[str, float], phases: dict[str, float]
) -> None:
    reported = shown(state, **seconds)
    assert phases.items() <= reported.items()
    assert sum(reported.values()) == pytest.approx(10 * seconds["total"])
