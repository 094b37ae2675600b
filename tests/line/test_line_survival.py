"""Whatever dies while answers of every kind are given: they end as if nothing had happened, to the byte."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.line.conftest import KV_CACHE_BYTES, Line
from tests.line.survivors import KINDS, STREAMED, Reading, reader_of

Deaths = Mapping[int, tuple[str, signal.Signals]]
"""When every answer has had so many events: who gets which signal."""
SHORT, LONG = 36, 70
"""Tokens of an answer."""
VICTIMS = ("engine-0", "engine-1", "output-processor-0", "output-processor-1", "processor-0")


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """Two replicas of the demo model and two output processors: for each there is another one."""
    env = {"HEADWATER_KV_CACHE_MEMORY": str(KV_CACHE_BYTES)}
    line = Line(tmp_path_factory.mktemp("survival"), "--replicas=2", "--output-processors=2", env=env)
    yield line
    assert line.stop() == 0, line.log.read_text()


def read_together(line: Line, max_tokens: int, deaths: Deaths) -> tuple[dict[str, Reading], float]:
    """All kinds at once, and when the last victim died; whoever died is back."""
    # Those that ask again and again are left last.
    kinds = [*(kind for kind in KINDS if kind not in STREAMED), *STREAMED]
    readers = {kind: reader_of(line.record, kind, max_tokens) for kind in kinds}
    before, died_at = {victim: line.pid_of(victim) for victim, _ in deaths.values()}, time.monotonic()
    with contextlib.ExitStack() as stack:
        for reader in readers.values():
            stack.enter_context(reader.running())
        for num_events, (victim, number) in deaths.items():
            for reader in readers.values():
                reader.wait_events(num_events)
            died_at = time.monotonic()
            os.kill(before[victim], number)
    for victim, pid in before.items():
        line.wait_for(lambda victim=victim, pid=pid: line.pid_of(victim) != pid, 60, f"{victim} is not back")  # type: ignore[misc]
    return {kind: reader.reading for kind, reader in readers.items()}, died_at


def undisturbed(line: Line, max_tokens: int) -> dict[str, dict[str, Any]]:
    readings, _ = read_together(line, max_tokens, {})
    assert {kind: reading.error for kind, reading in readings.items() if reading.error} == {}
    return {kind: reading.answer for kind, reading in readings.items()}


@pytest.mark.slow
def test_answers_of_every_kind_end_the_same_whoever_dies_or_leaves_meanwhile(line: Line) -> None:
    expected = undisturbed(line, SHORT)
    for deaths in (
        {
            6: ("output-processor-0", signal.SIGKILL),
            14: ("engine-0", signal.SIGKILL),
            22: ("processor-0", signal.SIGKILL),
        },
        {6: ("engine-1", signal.SIGTERM), 14: ("output-processor-1", signal.SIGKILL)},
    ):
        readings, _ = read_together(line, SHORT, deaths)
        for kind, reading in readings.items():
            assert reading.answer == expected[kind], f"{kind} when {deaths}"
    assert line.metric("headwater_migrations_total") > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_events", [1, *range(10, LONG, 10)])
def test_answers_of_every_kind_end_the_same_whoever_is_killed_at_every_tenth_token(line: Line, num_events: int) -> None:
    expected, pauses = undisturbed(line, LONG), list[float]()
    for victim in VICTIMS:
        readings, died_at = read_together(line, LONG, {num_events: (victim, signal.SIGKILL)})
        for kind, reading in readings.items():
            assert reading.answer == expected[kind], f"{kind} when {victim} died at {num_events}"
            if reading.times and has_moved(line, reading):
                pauses.append(reading.pause_after(died_at))
        print(f"{victim} died at {num_events}:", " ".join(f"{pause:.2f}" for pause in sorted(pauses)))
    # The aim is 1.5 s on a free machine; the figures are in docs/benchmarks.md.
    assert statistics.median(pauses) < 5


def has_moved(line: Line, reading: Reading) -> bool:
    told = line.client.get(f"/v1/requests/{reading.request_id}/explain").json()
    return len(told["prompts"][0]["attempts"]) > 1
