"""`headwater bench queue`: queue policies beside order of arrival, on an engine in this process.

Without `--model` the executor is simulated, with costs that were measured on a GPU, and the clock
is virtual. Each load is played at parts of the engine's capacity, which is measured first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from headwater.engine_core.queue_policies import POLICIES
from headwater.engine_core.scheduling.seating.tenant_shares import split

from .figures import show_rows
from .program import check_choice, run_program
from .queue_loads import MIXES, Arrival, at_rate, traced, within
from .queue_machine import Machine
from .queue_run import Outcome, QueuePlayer, QueueRun
from .workloads import MODELS

TRACE = "trace"
BASE = "fcfs"
EARLY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of one policy. Times are milliseconds; figures that end in _x are multiples of those
    of fcfs."""

    load: str
    part: float
    policy: str
    ttft: float
    """Mean, of the requests that were answered."""
    ttft_x: float
    long_p99: float
    """p99 of the time to first token of the tenth of the requests that have most tokens."""
    long_p99_x: float
    long_end_p99_x: float
    """The same of the time to their last token."""
    good: float
    """Requests a second that met both goals."""
    good_x: float
    refused: int
    preempted: int
    jain: float
    """Jain's index of the tenants' tokens, relative to their fair parts."""


def measure(
    name: str,
    load: Sequence[Arrival],
    parts: Sequence[float],
    policies: Sequence[str],
    machine: Machine,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """Plays the load at each part of the capacity, under order of arrival and each policy."""
    capacity = capacity_of(_played(machine, BASE, at_rate(load, np.inf)))
    report(f"{name}: capacity {capacity:.2f} requests/s")
    for part in parts:
        timed = at_rate(load, part * capacity)
        base = _played(machine, BASE, timed)
        for policy in dict.fromkeys((BASE, *policies)):
            run = base if policy == BASE else _played(machine, policy, timed)
            yield row_of(name, part, policy, run, base)


def _played(machine: Machine, policy: str, load: Sequence[Arrival]) -> QueueRun:
    engine, clock = machine.engine(policy)
    return QueuePlayer(engine, clock).play(load)


def capacity_of(run: QueueRun) -> float:
    """Requests a second of an engine that always has enough to do: without the first and the last
    tenth of those that end."""
    ends = sorted(each.ended_at for each in run.outcomes if each.ended_at is not None)
    tenth = len(ends) // 10
    return (len(ends) - 2 * tenth - 1) / (ends[-tenth - 1] - ends[tenth])


def row_of(name: str, part: float, policy: str, run: QueueRun, base: QueueRun) -> Row:
    ttft, long_p99, long_end, good = figures_of(run)
    base_ttft, base_long_p99, base_long_end, base_good = figures_of(base)
    return Row(
        load=name,
        part=part,
        policy=policy,
        ttft=round(ttft * 1e3, 1),
        ttft_x=round(ttft / base_ttft, 3),
        long_p99=round(long_p99 * 1e3, 1),
        long_p99_x=round(long_p99 / base_long_p99, 3),
        long_end_p99_x=round(long_end / base_long_end, 3),
        good=round(good, 3),
        good_x=round(good / base_good, 3) if base_good else 0.0,
        refused=sum(each.is_refused for each in run.outcomes),
        preempted=run.num_preemptions,
        jain=round(jain_of(run.outcomes), 4),
    )


def figures_of(run: QueueRun) -> tuple[float, float, float, float]:
    """Mean time to first token; p99 of that, and of the time to the last, of the longest tenth;
    requests a second that met both goals."""
    answered = [each for each in run.outcomes if not each.is_refused]
    by_length = sorted(answered, key=lambda each: each.arrival.num_tokens)
    longest = by_length[-max(1, len(run.outcomes) // 10) :]
    ends = [(each.ended_at or 0.0) - each.arrival.at for each in longest]
    return (
        float(np.mean(_ttfts(answered))),
        float(np.percentile(_ttfts(longest), 99)),
        float(np.percentile(ends, 99)),
        sum(each.is_good for each in answered) / run.seconds,
    )


def jain_of(outcomes: Sequence[Outcome]) -> float:
    """Jain's index over tenants of the tokens given while requests arrive, each divided by its fair
    part: what it asked for, at most an equal share of all tokens given. The last fifth of the
    requests is left out, since much of it would still be running."""
    last_arrival = max(each.arrival.at for each in outcomes)
    outcomes = [each for each in outcomes if each.arrival.at <= EARLY * last_arrival]
    asked = Counter[str]()
    given = Counter[str]()
    for each in outcomes:
        asked[each.arrival.tenant] += each.arrival.num_tokens
        is_given = not each.is_refused and (each.ended_at or 0.0) <= last_arrival
        given[each.arrival.tenant] += each.arrival.num_tokens * is_given
    fair = split(given.total(), asked, lambda _: 1.0)
    parts = [given[name] / fair[name] for name in asked]
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


def _ttfts(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.ttft for each in outcomes if each.ttft is not None]


def main(
    load: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(MIXES)} or {TRACE}; repeatable; default: all that there are"
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="file in Mooncake's format, for the load `trace`")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="policies to measure; repeatable; default: all")
    ] = None,
    part: Annotated[
        list[float] | None, typer.Option(help="parts of the capacity; default: 0.7, 0.9, 0.95")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=20, help="requests of a load")] = 1500,
    model: Annotated[
        str,
        typer.Option(help=f"{', '.join(MODELS)} or tiny, with random weights; empty: simulated"),
    ] = "",
    device: Annotated[str, typer.Option(help="of the model: auto, cpu or cuda")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="requests that run at once")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="token budget of a step")] = 2048,
    seed: Annotated[int, typer.Option(help="seed of the loads")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Measure queue policies beside order of arrival, at parts of an engine's capacity."""
    names = load or [*MIXES, *([TRACE] if trace is not None else [])]
    for name in names:
        check_choice("load", name, (*MIXES, TRACE))
    for name in policy or ():
        check_choice("policy", name, POLICIES)
    if model:
        check_choice("model", model, (*MODELS, "tiny"))
    if TRACE in names and trace is None:
        raise typer.BadParameter("the load trace needs a file: --trace")
    machine = Machine(model, device, max_num_seqs, max_num_batched_tokens)
    rows = []
    for name in names:
        rng = np.random.default_rng(seed)
        made = (
            traced(trace, num_requests)
            if name == TRACE and trace is not None
            else MIXES[name](num_requests, rng)
        )
        report = (lambda _: None) if as_json else typer.echo
        made = within(made, machine.max_model_len)
        for row in measure(
            name, made, part or (0.7, 0.9, 0.95), policy or list(POLICIES), machine, report
        ):
            rows.append(row)
            if as_json:
                print(json.dumps(asdict(row)), flush=True)
    if not as_json:
        show_rows(rows, "Queue policies", as_json=False)


if __name__ == "__main__":
    run_program(main)
