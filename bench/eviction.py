"""Compares orders of eviction on traces of agents and chats: hits, work and first tokens.

`headwater bench eviction`. Each memory is a share of the blocks of all prompts. `informed` knows
the distributions that the trace is drawn from, `belady` knows the trace. First tokens are those of
one server, as fast as it has to be for LRU to keep it busy for `--busy` of the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from headwater.engine_core.queue_policies import AGING

from .agent_sessions import LOADS, AgentRecord, draw_sessions, scaled, write_trace
from .cache_replay import (
    BeladyCache,
    Cache,
    PoolCache,
    Prefill,
    Replayed,
    full_blocks,
    known_times,
    replay,
    turn_and_agent_of,
    turn_of,
)
from .figures import AsJson, show_rows
from .plot import check_plot, plot_lines
from .program import check_choice, run_program
from .trace_file import TraceRecord, read_trace

MEMORIES = (0.05, 0.15, 0.40)
FIRST_OTHER = 1000
NUM_OTHER_DRAWS = 4
"""Draws of a load over which the informed order counts return times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    trace: str
    memory_percent: float
    policy: str
    hit_percent: float
    """Share of prompt tokens."""
    hits_of_lru: float
    compute_of_lru: float
    """Seconds in which prompts are computed."""
    ttft_mean_of_lru: float
    ttft_p99_of_lru: float
    srpt_p99_of_lru: float
    """The same where the shortest prompt is computed first, LRU's in order of arrival."""


def compare(
    name: str,
    records: Sequence[TraceRecord],
    others: Sequence[Sequence[AgentRecord]],
    busy: float,
    memories: Sequence[float] = MEMORIES,
) -> list[Outcome]:
    """Outcomes of each memory under each order. `others`: other draws of the same load; empty: the
    informed order is left out."""
    trace = [full_blocks(record) for record in records]
    num_blocks = len({hash_id for ids in trace for hash_id in ids})
    prefill = Prefill()
    outcomes = []
    known = known_times(prefill.costs, others)
    for memory in memories:
        count = round(num_blocks * memory)
        caches: dict[str, Callable[[], Cache]] = {
            "lru": partial(PoolCache, count, None),
            "value": partial(PoolCache, count, prefill.costs),
            "informed": partial(PoolCache, count, prefill.costs, known),
            "belady": partial(BeladyCache, count, trace),
        }
        if not others:
            del caches["informed"]
        found = {
            policy: replay(
                records, cache(), prefill, turn_and_agent_of if policy == "informed" else turn_of
            )
            for policy, cache in caches.items()
        }
        outcomes += [
            _outcome(name, memory, policy, each, found["lru"], busy)
            for policy, each in found.items()
        ]
    return outcomes


def _outcome(
    name: str, memory: float, policy: str, found: Replayed, lru: Replayed, busy: float
) -> Outcome:
    speed = lru.load / busy
    seconds = found.first_token_seconds(speed)
    of_lru = lru.first_token_seconds(speed)
    shortest_first = found.first_token_seconds(speed, AGING)
    p99_of_lru = np.quantile(of_lru, 0.99)
    return Outcome(
        trace=name,
        memory_percent=round(100 * memory, 1),
        policy=policy,
        hit_percent=round(100 * found.hit_share, 2),
        hits_of_lru=round(found.hit_share / lru.hit_share, 3),
        compute_of_lru=round(sum(found.prefills) / sum(lru.prefills), 3),
        ttft_mean_of_lru=round(float(seconds.mean() / of_lru.mean()), 3),
        ttft_p99_of_lru=round(float(np.quantile(seconds, 0.99) / p99_of_lru), 3),
        srpt_p99_of_lru=round(float(np.quantile(shortest_first, 0.99) / p99_of_lru), 3),
    )


def _plot(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Hits by memory, a panel a trace, a line a policy."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in outcomes:
        points = panels.setdefault(each.trace, {}).setdefault(each.policy, [])
        points.append((each.memory_percent, each.hit_percent))
    axes = ("memory, % of all blocks", "hits, % of prompt tokens")
    plot_lines(
        path, panels, axes, "Hits by memory", json.dumps([asdict(each) for each in outcomes])
    )


def main(
    trace: Annotated[
        list[str], typer.Option(help=f"{', '.join(LOADS)}, or a file; may be repeated")
    ] = list(LOADS),  # noqa: B006 (typer reads the default, and nobody changes it)
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    sessions: Annotated[float, typer.Option(help="times as many sessions")] = 1.0,
    busy: Annotated[float, typer.Option(help="share of the time that LRU computes")] = 0.9,
    write: Annotated[Path | None, typer.Option(help="folder for the drawn requests")] = None,
    plot: Annotated[Path | None, typer.Option(help="plot of hits by memory")] = None,
    as_json: AsJson = False,
) -> None:
    """Orders of eviction on a trace in Mooncake's format, or on drawn sessions of agents."""
    check_plot(plot)
    for each in trace:
        if not Path(each).suffix:
            check_choice("--trace", each, LOADS)
    outcomes = list[Outcome]()
    for each in trace:
        if Path(each).suffix:
            outcomes += compare(Path(each).stem, read_trace(Path(each)), [], busy)
            continue
        load = scaled(LOADS[each], sessions)
        drawn = draw_sessions(load, seed)
        if write is not None:
            write.mkdir(parents=True, exist_ok=True)
            write_trace(write / f"{each}-{seed}.jsonl", drawn)
        others = [
            draw_sessions(load, seed + number)
            for number in range(FIRST_OTHER, FIRST_OTHER + NUM_OTHER_DRAWS)
        ]
        outcomes += compare(each, drawn, others, busy)
    show_rows(outcomes, "orders of eviction", as_json=as_json)
    if plot is not None:
        _plot(plot, outcomes)


if __name__ == "__main__":
    run_program(main)
