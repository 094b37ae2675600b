"""`headwater bench restart`: what clients notice of an engine that is killed in the middle of their
answers, and what the engine's next life does meanwhile. Starts and ends a cluster of its own.

The pause is the longest time without a piece of the answer from SIGKILL on; the answer must be the
one that the engine gives undisturbed. Of several answers, the longest pause counts. Beside a second
engine (`--up=--replicas=2`) answers go on there.
"""

from __future__ import annotations

import json
import operator
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from headwater.services.stack.cluster_record import ClusterRecord, StageRecord, read_cluster

from .own_cluster import own_cluster, wait_until_prepared
from .program import check_choice, run_program
from .start_timeline import core_phases

VICTIMS = ("core", "server")
PREPARED_SECONDS = 60.0
STANDBY_SECONDS = 3.0
"""Seconds that a process takes to stand by for the next life of an engine that is prepared."""
PIECES_BEFORE = 10
"""Pieces of an answer before its engine is killed. A piece may have several tokens."""
PROMPT = "Name the rivers that you know, and what lies at their headwaters."


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One death, in seconds."""

    pause: float
    """Seconds without a piece of the answer that waited longest."""
    num_same: int
    """Number of answers that are those of an engine that was left alone."""
    phases: dict[str, float]
    """Seconds from the kill to the beginning of each phase of the next life's core, and to `ready`,
    the line of its server."""


@dataclass(slots=True)
class Answer:
    """A streamed answer, as it comes."""

    pieces: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """When each piece came, on the clock of time.time()."""
    is_over: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def read(self, record: ClusterRecord, seed: int, tokens: int) -> None:
        try:
            for piece in _pieces(record, seed, tokens):
                self.arrivals.append(time.time())
                self.pieces.append(piece)
        finally:
            self.is_over = True

    def pause(self, killed_at: float) -> float:
        """Longest time without a piece behind the kill: pieces that were on their way come at once.
        0: the answer was there."""
        arrivals = [at - killed_at for at in self.arrivals if at > killed_at]
        gaps = map(operator.sub, arrivals, [0.0, *arrivals[:-1]])
        return max(gaps, default=0.0)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="deaths")] = 5,
    victim: Annotated[str, typer.Option(help="core (computes) or server (of the engine)")] = "core",
    tokens: Annotated[int, typer.Option(help="of an answer")] = 400,
    streams: Annotated[int, typer.Option(min=1, help="answers at once")] = 1,
    up: Annotated[
        list[str] | None,
        typer.Option(help="flag of `headwater up`; repeatable: --up=--device=cuda"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Kill an engine in the middle of answers, and measure their pauses."""
    check_choice("victim", victim, VICTIMS)
    with own_cluster(["--replicas=1", *(up or ())]) as (record, folder):
        # The first answer may wait for what is compiled when it is needed.
        expected = [_answers(record, range(streams), tokens) for _ in range(2)][-1]
        restarts = [_killed(folder, victim, tokens, expected) for _ in range(rounds)]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in restarts], indent=2))
        return
    table = Table("what", "median s", "least", "most")
    _add(table, "without a piece", [each.pause for each in restarts])
    for phase in restarts[-1].phases:
        found = [each.phases[phase] for each in restarts if phase in each.phases]
        _add(table, f"to {phase}", found)
    Console().print(table)
    num_same = sum(each.num_same for each in restarts)
    typer.echo(f"{num_same} of {rounds * streams} answers are the same as without a death")


def _killed(folder: Path, victim: str, tokens: int, expected: Sequence[str]) -> Restart:
    record = read_cluster(folder)
    assert record is not None
    # As an engine is found that has served for a while.
    wait_until_prepared(record, PREPARED_SECONDS)
    time.sleep(STANDBY_SECONDS)
    stage = _engine(record)
    pid = stage.pid if victim == "server" else stage.children[0]
    answers = [Answer() for _ in expected]
    with ThreadPoolExecutor(len(answers)) as pool:
        calls = [
            pool.submit(answer.read, record, seed, tokens) for seed, answer in enumerate(answers)
        ]
        while any(len(each.pieces) < PIECES_BEFORE and not each.is_over for each in answers):
            time.sleep(0.001)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
    for call in calls:
        call.result()
    while (after := read_cluster(folder)) is None or _engine(after).pid == stage.pid:
        time.sleep(0.05)
    phases = core_phases(folder / "logs" / f"{stage.name}.log", since=killed_at)
    return Restart(
        pause=max(answer.pause(killed_at) for answer in answers),
        num_same=sum(answer.text == text for answer, text in zip(answers, expected, strict=True)),
        phases={name: when - killed_at for name, when in phases.items()},
    )


def _add(table: Table, what: str, values: list[float]) -> None:
    figures = statistics.median(values), min(values), max(values)
    table.add_row(what, *(f"{value:.2f}" for value in figures))


def _engine(record: ClusterRecord) -> StageRecord:
    return next(stage for stage in record.stages if stage.name.startswith("engine"))


def _answers(record: ClusterRecord, seeds: Sequence[int], tokens: int) -> list[str]:
    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(lambda seed: "".join(_pieces(record, seed, tokens)), seeds))


def _pieces(record: ClusterRecord, seed: int, tokens: int) -> Iterator[str]:
    body = {
        "model": record.model,
        "messages": [{"role": "user", "content": PROMPT}],
        # Drawn tokens are drafted less well than the loops of greedy answers: there are many
        # pieces.
        "temperature": 1,
        "seed": 7 + seed,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{record.rest}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            for choice in chunk.get("choices", ()):
                delta = choice["delta"]
                if text := delta.get("content") or delta.get("reasoning_content"):
                    yield text


if __name__ == "__main__":
    run_program(main)
