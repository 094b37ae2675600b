"""The timeline of a start is read from the logs and the processes of a cluster that is ready."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from headwater.bench.processes import cpu_seconds_of_all
from headwater.bench.start_timeline import Span, draw, read_timeline
from headwater.services.stack.cluster_record import ClusterRecord, StageRecord

CORE = "engine-0's core"


@pytest.fixture
def started() -> list[float]:
    """Times before and after the processes of `pids` were started."""
    return []


@pytest.fixture
def pids(started: list[float]) -> Iterator[dict[str, int]]:
    """Processes of a server, of a gateway, and of an engine with a core."""
    with ExitStack() as stack:
        started.append(time.time())
        processes = {
            name: subprocess.Popen(["sleep", "60"])
            for name in ("nats", "engine-0", CORE, "gateway-0")
        }
        for process in processes.values():
            stack.callback(process.wait)
            stack.callback(process.terminate)
        started.append(time.time())
        yield {name: process.pid for name, process in processes.items()}


def test_the_spans_of_each_process_follow_one_another_up_to_ready(
    tmp_path: Path, pids: dict[str, int], started: list[float]
) -> None:
    first, last = started
    began = first - 1
    phases = [("loading weights", 2.0), ("loading weights", 2.2), ("warming up", 3.0)]
    write_log(tmp_path / "engine-0.log", began, phases, ready=4.0)
    write_log(tmp_path / "gateway-0.log", began, [], ready=3.5)
    (tmp_path / "nats.log").write_text("[1] Server is ready\n")
    spans = read_timeline(record_of(pids), tmp_path, began=began, ready=4.5)
    assert phases_of("up", spans) == [
        "imports, settings, model folder",
        "waits for NATS and Valkey",
        "waits for the stages",
        "waits until the gateway is ready",
    ]
    core = [span for span in spans if span.process == CORE]
    assert [span.phase for span in core] == [
        "interpreter and first imports",
        "loading weights",
        "warming up",
    ]
    assert [span.end for span in core] == pytest.approx([2.0, 3.0, 4.0], abs=1e-3)
    assert [span.end for span in spans if span.process == "gateway-0"] == pytest.approx(
        [3.5], abs=1e-3
    )
    # A child is dated to a hundredth of a second.
    assert all(0.98 < span.begin < last - began + 0.02 for span in spans if span.process == "nats")
    assert all(later.begin == pytest.approx(span.end) for span, later in pairwise(core))


def test_processor_time_of_a_cluster_is_that_of_all_its_processes() -> None:
    spin = "import time; [None for _ in iter(lambda: time.process_time() < 0.3, False)]"
    grandchild = (
        "import subprocess, sys, time; subprocess.run([sys.executable, '-c', "
        f"{spin!r}]); time.sleep(600)"
    )
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])",
        ]
    ) as process:
        try:
            while cpu_seconds_of_all(process.pid) < 0.3:
                time.sleep(0.05)
            assert cpu_seconds_of_all(process.pid) < 3
        finally:
            subprocess.run(["pkill", "-P", str(process.pid)], check=True)


def test_a_bar_begins_and_ends_where_its_span_does() -> None:
    half = Span(process="core", phase="loading", begin=1.0, end=2.0, cpu=0.5)
    text = StringIO()
    Console(file=text, width=200).print(
        draw([Span(process="up", phase="all", begin=0.0, end=2.0), half])
    )
    bars = [
        line.split("│")[-2].rstrip()
        for line in text.getvalue().splitlines()
        if "━" in line and "│" in line
    ]
    assert [bar.count("━") for bar in bars] == [60, 30]
    assert [len(bar) for bar in bars] == [61, 61]
    assert "0.50" in text.getvalue()


def phases_of(process: str, spans: list[Span]) -> list[str]:
    return [span.phase for span in spans if span.process == process]


def record_of(pids: dict[str, int]) -> ClusterRecord:
    stages = tuple(
        StageRecord(
            name=name,
            pid=pid,
            addresses={"url": "nats://"} if name == "nats" else {"grpc": "127.0.0.1:1"},
            children=(pids[CORE],) if name == "engine-0" else (),
        )
        for name, pid in pids.items()
        if name != CORE
    )
    return ClusterRecord(
        pid=pids["gateway-0"],
        model="m",
        rest="http://",
        grpc="",
        nats_url="",
        redis_url="",
        stages=stages,
    )


def write_log(log: Path, began: float, phases: list[tuple[str, float]], *, ready: float) -> None:
    lines = [{"event": "loading", "phase": phase, "at": began + at} for phase, at in phases]
    lines.append(
        {"event": "ready", "timestamp": datetime.fromtimestamp(began + ready, UTC).isoformat()}
    )
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
