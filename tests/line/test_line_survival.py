"""Whatever dies while answers of every kind are given: they end as if nothing had happened, to the
byte.

Of each stage that dies here the line has another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.line.conftest import Line
from tests.line.survivors import KINDS, STREAMED, Reading, reader_of

Deaths = Mapping[int, tuple[str, signal.Signals]]
"""When every answer has had so many events: who gets which signal."""
SHORT = 24
LONG = 70
"""Tokens of an answer."""
CORE = "'s core"
"""Of an engine: the process that its server starts."""
VICTIMS = ("engine-0", "engine-1", "output-processor-0", "output-processor-1", "processor-0")


def read_together(line: Line, max_tokens: int, deaths: Deaths) -> tuple[dict[str, Reading], float]:
    """All kinds at once, and when the last victim died; whoever died is back."""
    # Those that ask again and again are left last.
    kinds = [*(kind for kind in KINDS if kind not in STREAMED), *STREAMED]
    readers = {kind: reader_of(line.record, kind, max_tokens) for kind in kinds}
    victims = {victim for victim, _ in deaths.values()}
    died_at = time.monotonic()
    before = {victim: line.pid_of(stage_of(victim)) for victim in victims}
    with contextlib.ExitStack() as stack:
        for reader in readers.values():
            stack.enter_context(reader.running())
        for num_events, (victim, number) in deaths.items():
            for reader in readers.values():
                reader.wait_events(num_events)
            died_at = time.monotonic()
            os.kill(
                line.pids_of(stage_of(victim))[1] if victim.endswith(CORE) else before[victim],
                number,
            )
    for victim, pid in before.items():
        line.wait_for(
            lambda victim=victim, pid=pid: line.pid_of(stage_of(victim)) != pid,
            120,
            f"{victim} is not back",
        )  # type: ignore[misc]
    return {kind: reader.reading for kind, reader in readers.items()}, died_at


def stage_of(victim: str) -> str:
    return victim.removesuffix(CORE)


def undisturbed(line: Line, max_tokens: int) -> dict[str, dict[str, Any]]:
    readings, _ = read_together(line, max_tokens, {})
    assert {kind: reading.error for kind, reading in readings.items() if reading.error} == {}
    return {kind: reading.answer for kind, reading in readings.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {
            4: ("output-processor-0", signal.SIGKILL),
            9: ("engine-0", signal.SIGKILL),
            14: ("processor-0", signal.SIGKILL),
        },
        {4: ("engine-1", signal.SIGTERM), 9: ("output-processor-1", signal.SIGKILL)},
    ],
    ids=["three die", "one leaves and one dies"],
)
@pytest.mark.long
def test_answers_of_every_kind_end_the_same_whoever_dies_or_leaves_meanwhile(
    demo_line: Line, deaths: Deaths
) -> None:
    expected = undisturbed(demo_line, SHORT)
    readings, _ = read_together(demo_line, SHORT, deaths)
    for kind, reading in readings.items():
        assert reading.answer == expected[kind], f"{kind} when {deaths}"
    if "engine-0" in {victim for victim, _ in deaths.values()}:
        assert any(has_moved(demo_line, reading) for reading in readings.values() if reading.times)


@pytest.fixture(scope="module")
def pauses() -> Iterator[defaultdict[str, list[float]]]:
    """Extra seconds of answers that moved, by who died; figures for
    bench/results/promises.jsonl."""
    pauses = defaultdict[str, list[float]](list)
    yield pauses
    killed = [each for victim in VICTIMS for each in pauses[victim]]
    for victim, seconds in [*pauses.items(), ("all that were killed", killed)] if killed else []:
        if not seconds:
            continue
        p50, p99 = np.percentile(seconds, (50, 99))
        print(
            f"{victim}: {len(seconds)} moved, p50 {p50:.2f} s, p99 {p99:.2f} s, most "
            f"{max(seconds):.2f} s"
        )


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_events", [1, *range(10, LONG, 10)])
def test_answers_of_every_kind_end_the_same_whoever_is_killed_at_every_tenth_token(
    demo_line: Line, pauses: defaultdict[str, list[float]], num_events: int
) -> None:
    expected = undisturbed(demo_line, LONG)
    for victim in VICTIMS:
        check_answers(demo_line, expected, {num_events: (victim, signal.SIGKILL)}, pauses[victim])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_answers_of_every_kind_end_the_same_when_an_engines_core_hangs(
    demo_line: Line, pauses: defaultdict[str, list[float]]
) -> None:
    hung = "engine-0" + CORE
    check_answers(
        demo_line, undisturbed(demo_line, LONG), {30: (hung, signal.SIGSTOP)}, pauses[hung]
    )


def check_answers(
    line: Line, expected: dict[str, dict[str, Any]], deaths: Deaths, pauses: list[float]
) -> None:
    readings, died_at = read_together(line, LONG, deaths)
    for kind, reading in readings.items():
        assert reading.answer == expected[kind], f"{kind} when {deaths}"
        if reading.times and has_moved(line, reading):
            pauses.append(reading.pause_after(died_at))
            print(f"{deaths}: {kind} {pauses[-1]:.2f}")


def has_moved(line: Line, reading: Reading) -> bool:
    reported = line.client.get(f"/v1/requests/{reading.request_id}/explain").json()
    return len(reported["prompts"][0]["attempts"]) > 1
