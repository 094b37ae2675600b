"""Replays traces through routing policies over simulated replicas; measures cached tokens and times
to first token.

`python -m tests.simulation.policy_replay --trace FILE`. Our policy is the gateway's own router,
index and membership, on a virtual clock, with messages over a bus in memory; the others are
formulas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from rich.console import Console
from rich.table import Column, Table

from headwater.bench.plot import check_plot, plot_curves
from headwater.bench.program import run_program
from headwater.gateway.router.dispatches import Dispatch
from headwater.gateway.router.router import Router
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Members
from headwater.services.runtime.process import configure_logging
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from tests.simulation.bus_twin import Air, BusTwin
from tests.simulation.replica_facts import EngineStub
from tests.simulation.routing_policies import RULES, Rule, Sight
from tests.simulation.routing_traces import BLOCK_SIZE, Arrival, conversation, ladder
from tests.simulation.simulated_replica import Hardware, Job, SimulatedReplica
from tests.simulation.virtual_loop import run_virtually

OURS = "seconds (headwater)"
NUM_REPLICAS = 8
CONVERSATION_BLOCKS = 1500
LADDER_BLOCKS = 600
MODEL = ServedModel(
    name="replay",
    revision="r",
    dtype="bfloat16",
    block_size=BLOCK_SIZE,
    kv_format="bfloat16",
    max_model_len=1 << 20,
    vocab_size=1 << 17,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one trace under one policy."""

    trace: str
    policy: str
    hit_rate: float
    """Share of prompt tokens that were found cached."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    busiest_share: float
    """Share of the requests of the replica that got most."""
    ttfts: list[float] = field(repr=False)


class Sender(Protocol):
    """A policy at work; `send` chooses a replica and returns the callbacks for the computed prompt
    and the end of the request."""

    def send(self, arrival: Arrival) -> tuple[str, Callable[[int], None], Callable[[], None]]: ...


class RuleSender:
    """Keeps the counts that a formula reads."""

    def __init__(self, rule: Rule, replicas: dict[str, SimulatedReplica]) -> None:
        self._rule = rule
        self._replicas = replicas
        self._num_requests = Counter[str]()
        self._held: dict[str, Counter[bytes]] = {replica_id: Counter() for replica_id in replicas}
        """Number of requests that hold a block."""

    def send(self, arrival: Arrival) -> tuple[str, Callable[[int], None], Callable[[], None]]:
        seen = [
            self._sight(replica_id, replica, arrival)
            for replica_id, replica in self._replicas.items()
        ]
        chosen = seen[self._rule(arrival, seen)].replica_id
        held = self._held[chosen]
        self._num_requests[chosen] += 1
        held.update(arrival.hashes)

        def finished() -> None:
            self._num_requests[chosen] -= 1
            for block in arrival.hashes:
                held[block] -= 1
                if not held[block]:
                    del held[block]

        return chosen, lambda _: None, finished

    def _sight(self, replica_id: str, replica: SimulatedReplica, arrival: Arrival) -> Sight:
        held = self._held[replica_id]
        return Sight(
            replica_id=replica_id,
            num_matched=replica.cache.matched(arrival.hashes),
            num_requests=self._num_requests[replica_id],
            num_waiting=replica.num_waiting,
            num_prefill_tokens=replica.load().num_prefill_tokens,
            # The block that an answer is written to is each request's own.
            num_active_blocks=len(held) + self._num_requests[replica_id],
            num_new_blocks=sum(block not in held for block in arrival.hashes) + 1,
            num_blocks=replica.hardware.num_blocks,
        )


class RouterSender:
    """Sender with the gateway's router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def send(self, arrival: Arrival) -> tuple[str, Callable[[int], None], Callable[[], None]]:
        hashes = b"".join(arrival.hashes)
        decision = self._router.choose(
            MODEL.key, hashes, arrival.num_prompt_tokens, arrival.num_output_tokens
        )
        dispatch: Dispatch = self._router.dispatches.begin(decision, str(arrival.number))
        return (
            decision.replica_id,
            lambda cached: self._router.dispatches.started(dispatch, cached),
            lambda: self._router.dispatches.finished(dispatch),
        )


@contextlib.asynccontextmanager
async def _routed(air: Air, replicas: dict[str, SimulatedReplica]) -> AsyncIterator[RouterSender]:
    """Sender with a gateway's router that knows every replica."""

    @contextlib.asynccontextmanager
    async def dial(address: str) -> AsyncIterator[EngineStub]:
        yield EngineStub(lambda: replicas[address].facts)

    clock = asyncio.get_running_loop().time
    async with BusTwin.on(air) as bus:
        members = Members(bus, (Kind.ENGINE,), clock=clock)
        feed = IndexFeed(bus, members, Store(None), dial=dial, clock=clock, wall_clock=clock)
        router = Router(bus, members, feed, clock=clock)
        async with members.running(), feed.running(), router.running():
            await members.wait_for(lambda known: len(known.of(Kind.ENGINE)) == len(replicas))
            # Their first snapshots.
            await asyncio.sleep(1)
            yield RouterSender(router)


async def replay(
    arrivals: Sequence[Arrival],
    policy: str,
    trace: str,
    hardware: Hardware,
    num_replicas: int = NUM_REPLICAS,
) -> Outcome:
    """Replays a trace under a policy. Runs on a virtual loop."""
    assert arrivals, "the last of them to finish ends the replay"
    loop = asyncio.get_running_loop()
    air = Air()
    started = dict[int, float]()
    counts = Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(BusTwin.on(air))
        replicas = {}
        for number in range(num_replicas):
            name = f"replica-{number}"
            member = Member(
                kind=Kind.ENGINE, replica_id=name, epoch=number + 1, address=name, model=MODEL
            )
            replicas[name] = await stack.enter_async_context(
                SimulatedReplica(member, hardware, bus).running()
            )
        sender: Sender
        if policy == OURS:
            sender = await stack.enter_async_context(_routed(air, replicas))
        else:
            sender = RuleSender(RULES[policy](), replicas)
        start = loop.time()
        num_left = len(arrivals)
        over = asyncio.Event()

        def job_of(arrival: Arrival) -> tuple[str, Job]:
            chosen, on_started, on_finished = sender.send(arrival)

            def computed(cached: int) -> None:
                started[arrival.number] = loop.time() - start - arrival.at
                on_started(cached)

            def finished() -> None:
                nonlocal num_left
                on_finished()
                num_left -= 1
                if not num_left:
                    over.set()

            job = Job(
                arrival.hashes,
                arrival.num_prompt_tokens,
                arrival.num_output_tokens,
                computed,
                finished,
                arrival.turn,
            )
            return chosen, job

        for arrival in arrivals:
            await asyncio.sleep(start + arrival.at - loop.time())
            chosen, job = job_of(arrival)
            counts[chosen] += 1
            replicas[chosen].submit(job)
        await over.wait()
        num_cached = sum(each.num_cached_tokens for each in replicas.values())
        num_tokens = sum(each.num_prompt_tokens for each in replicas.values())
    ttfts = list(started.values())
    p50, p90, p99 = np.percentile(ttfts, (50, 90, 99)).tolist()
    return Outcome(
        trace=trace,
        policy=policy,
        hit_rate=round(num_cached / num_tokens, 4),
        ttft_mean=round(float(np.mean(ttfts)), 6),
        ttft_p50=round(p50, 6),
        ttft_p90=round(p90, 6),
        ttft_p99=round(p99, 6),
        busiest_share=round(max(counts.values()) / len(arrivals), 4),
        ttfts=ttfts,
    )


def as_table(outcomes: Sequence[Outcome], title: str) -> Table:
    table = Table(
        Column("policy", no_wrap=True),
        "hit rate",
        "TTFT mean s",
        "p50",
        "p90",
        "p99",
        "busiest",
        title=title,
    )
    for each in outcomes:
        figures = (
            each.hit_rate,
            each.ttft_mean,
            each.ttft_p50,
            each.ttft_p90,
            each.ttft_p99,
            each.busiest_share,
        )
        table.add_row(each.policy, *(f"{figure:.3f}" for figure in figures))
    return table


def plain(outcome: Outcome) -> dict[str, Any]:
    figures = asdict(outcome)
    del figures["ttfts"]
    return figures


def main(
    trace: Annotated[
        Path | None, typer.Option(help="Conversation trace in Mooncake's format; none: skip it.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Only these (repeatable).")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Only so many requests of the trace.", min=1)
    ] = None,
    skip_ladder: Annotated[bool, typer.Option(help="Leave the shared-prefix ladder out.")] = False,
    prefill_tps: Annotated[
        float, typer.Option(help="Prompt tokens a second of a replica.")
    ] = 12_000.0,
    seed: Annotated[int, typer.Option(help="Of the ladder and of everything drawn.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the TTFTs here (png, svg, pdf, html).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Hit rate and time to first token of routing policies."""
    configure_logging("bench", "error")
    check_plot(plot)
    policies = policy or [OURS, *RULES]
    if unknown := set(policies) - {OURS, *RULES}:
        raise typer.BadParameter(
            f"no such policy: {', '.join(unknown)}; there are {', '.join((OURS, *RULES))}"
        )
    traces: dict[str, tuple[list[Arrival], int]] = {}
    if trace is not None:
        traces["conversation"] = conversation(trace, limit), CONVERSATION_BLOCKS
    if not skip_ladder:
        traces["shared-prefix ladder"] = ladder(seed), LADDER_BLOCKS
    outcomes: dict[str, list[Outcome]] = {}
    for name, (arrivals, num_blocks) in traces.items():
        hardware = Hardware(num_blocks=num_blocks, prefill_tps=prefill_tps)
        for each in policies:
            began = time.perf_counter()
            outcomes.setdefault(name, []).append(
                run_virtually(replay(arrivals, each, name, hardware), seed)
            )
            Console(stderr=True).print(f"{name}, {each}: {time.perf_counter() - began:.1f} s")
    if as_json:
        typer.echo(
            json.dumps([plain(each) for some in outcomes.values() for each in some], indent=2)
        )
    else:
        for name, some in outcomes.items():
            Console().print(as_table(some, name))
    if plot is not None:
        curves = {
            name: {each.policy: each.ttfts for each in some} for name, some in outcomes.items()
        }
        plot_curves(plot, curves, "time to first token", "Routing policies", _figures(outcomes))


def _figures(outcomes: dict[str, list[Outcome]]) -> str:
    return json.dumps([plain(each) for some in outcomes.values() for each in some], indent=2)


if __name__ == "__main__":
    run_program(main)
