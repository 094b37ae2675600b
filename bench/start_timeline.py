"""The timeline of a cluster's start: which process did what from when to when, and what processor
time it took.

Reads the record of a cluster that is ready, the logs of its stages and /proc; starts nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from headwater.services.stack.cluster_record import ClusterRecord, StageRecord

from .processes import cpu_seconds, stat_of

BAR_CHARS = 60
LIBRARIES = "interpreter and first imports"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One phase of a process; times in seconds from the command."""

    process: str
    phase: str
    begin: float
    end: float
    cpu: float | None = None
    """User and system seconds of the whole process up to now, in the first span of the process."""


def read_timeline(record: ClusterRecord, logs: Path, *, began: float, ready: float) -> list[Span]:
    """Spans of a cluster that has just become ready, in the order in which their processes began.
    `began`: time.time() at the command; `ready`: seconds after it."""
    by_stage = [_stage_spans(stage, logs / f"{stage.name}.log", began) for stage in record.stages]
    served = [
        spans
        for stage, spans in zip(record.stages, by_stage, strict=True)
        if "grpc" in stage.addresses
    ]
    servers = [spans[0].begin for spans in by_stage if spans not in served]
    first_stage = min(spans[0].begin for spans in served)
    marks = {
        "imports, settings, model folder": min([*servers, first_stage]),
        "waits for NATS and Valkey": first_stage,
        "waits for the stages": max(spans[0].end for spans in served),
        "waits until the gateway is ready": ready,
    }
    ends = [0.0, *marks.values()]
    own = [
        Span(
            process="up",
            phase=phase,
            begin=begin,
            end=end,
            cpu=cpu_seconds(record.pid) if begin == 0.0 else None,
        )
        for phase, (begin, end) in zip(marks, pairwise(ends), strict=True)
    ]
    return [
        *own,
        *(span for spans in sorted(by_stage, key=lambda each: each[0].begin) for span in spans),
    ]


def draw(spans: Sequence[Span]) -> Table:
    """A row for each span, with a bar that begins and ends where the span does."""
    scale = BAR_CHARS / max(span.end for span in spans)
    table = Table("process", "phase", "from s", "to s", "CPU s", "")
    for span in spans:
        at = round(span.begin * scale)
        bar = " " * at + "━" * max(1, round(span.end * scale) - at)
        cpu = "" if span.cpu is None else f"{span.cpu:.2f}"
        table.add_row(span.process, span.phase, f"{span.begin:.2f}", f"{span.end:.2f}", cpu, bar)
    return table


def _stage_spans(stage: StageRecord, log: Path, began: float) -> list[Span]:
    """A stage's span up to its `ready` line, then those of the core that an engine starts."""
    begin = born_at(stage.pid) - began
    ready_at = read_ready(log)
    ready = begin if ready_at is None else ready_at - began
    spans = [
        Span(
            process=stage.name,
            phase="until it is ready",
            begin=begin,
            end=ready,
            cpu=cpu_seconds(stage.pid),
        )
    ]
    phases = [
        (line["phase"], line["at"] - began) for line in _lines(log) if line["event"] == "loading"
    ]
    if phases and stage.children:
        spans += _core_spans(f"{stage.name}'s core", stage.children[0], phases, ready, began)
    return spans


def _core_spans(
    name: str, pid: int, phases: Sequence[tuple[str, float]], ready: float, began: float
) -> list[Span]:
    """A span for each phase, from its first report to the first of the next one."""
    begins = {LIBRARIES: born_at(pid) - began}
    for phase, at in phases:
        begins.setdefault(phase, at)
    ends = [*list(begins.values())[1:], ready]
    return [
        Span(
            process=name,
            phase=phase,
            begin=begin,
            end=end,
            cpu=cpu_seconds(pid) if phase == LIBRARIES else None,
        )
        for (phase, begin), end in zip(begins.items(), ends, strict=True)
    ]


def core_phases(log: Path, *, since: float) -> dict[str, float]:
    """Times, on the clock of time.time(), at which the core of an engine that was started after
    `since` began each of its phases, and at which its server was ready."""
    begins: dict[str, float] = {}
    for line in _lines(log):
        if line["event"] == "loading" and line["at"] >= since:
            begins.setdefault(line["phase"], line["at"])
        elif begins and line["event"] == "ready":
            begins.setdefault("ready", datetime.fromisoformat(line["timestamp"]).timestamp())
    return begins


def born_at(pid: int) -> float:
    """Time at which a process was started, on the clock of time.time(), to a hundredth of a
    second."""
    now = time.time()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return now - uptime + int(stat_of(pid)[19]) / os.sysconf("SC_CLK_TCK")


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    """Lines of a log that are JSON objects; NATS and Valkey write others."""
    if log.is_file():
        yield from (json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{")


def read_ready(log: Path) -> float | None:
    """Time at which a stage was ready by its log, on the clock of time.time(); None while it is
    not."""
    written_at = next((line["timestamp"] for line in _lines(log) if line["event"] == "ready"), None)
    return None if written_at is None else datetime.fromisoformat(written_at).timestamp()
