"""Measures the cost of a routing decision: look-up, scores of all replicas, choice, receipt and
accounting.

`python -m headwater.bench.routing_decision`; everything in one process, without network.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.gateway.router.router import Router
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind, Member, ReplicaLoad, new_epoch
from headwater.services.runtime.membership import Members
from headwater.services.runtime.process import configure_logging
from headwater.services.runtime.store import Store

from .figures import AsJson, show_rows
from .program import run_program
from .synthetic_publishers import MODEL

MAX_TOKENS = 256
NUM_SHARED = 16
"""Number of documents whose prefixes replicas hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Microseconds of `choose` and `dispatched` together."""

    case: str
    block_size: int
    num_blocks: int
    num_replicas: int
    index_blocks: int
    p50_us: float
    p99_us: float
    cpu_p50_us: float
    """Microseconds of this thread's CPU time: the cost where nothing else runs on the core."""
    cpu_p99_us: float
    dispatched_p50_us: float
    """Microseconds of `dispatched` alone: accounting and speculative entries."""


def timed_decision(
    router: Router, model_key: str, hashes: bytes, num_tokens: int
) -> tuple[float, float, float]:
    """Seconds of `choose` and `dispatched` together, of this thread's CPU time for both, and of
    `dispatched` alone."""
    cpu = time.thread_time()
    start = time.perf_counter()
    decision = router.choose(model_key, hashes, num_tokens, MAX_TOKENS)
    chosen = time.perf_counter()
    dispatch = router.dispatches.begin(decision, "request")
    end = time.perf_counter()
    cpu = time.thread_time() - cpu
    router.dispatches.started(dispatch, decision.predicted_cached_tokens)
    router.dispatches.finished(dispatch)
    return end - start, cpu, end - chosen


class Bench:
    """A router over replicas whose caches are filled at random; documents are shared, their tails
    are not."""

    def __init__(
        self, *, block_size: int, num_tokens: int, num_replicas: int, blocks_per_replica: int
    ) -> None:
        self.block_size = block_size
        self.num_tokens = num_tokens
        self.rng = random.Random(0)
        self.model = replace(MODEL, block_size=block_size)
        members = Members(Bus(None), (Kind.ENGINE,))
        self.feed = IndexFeed(Bus(None), members, Store(None))
        self.router = Router(Bus(None), members, self.feed)
        self.documents = [self.prompt() for _ in range(NUM_SHARED)]
        self.members = [self._replica(number) for number in range(num_replicas)]
        for member in self.members:
            members.on_member(member, from_bus=True)
            self._fill(member, blocks_per_replica)

    def prompt(self) -> list[bytes]:
        tokens = np.random.default_rng(self.rng.getrandbits(32)).integers(
            0, MODEL.vocab_size, self.num_tokens
        )
        return block_hashes(b"\0" * 16, tokens.astype(np.int32), self.block_size)

    def prompts(self, case: str, number: int) -> Iterator[bytes]:
        """Prompts of one kind: `cold` (nothing cached), `half` (a shared document's first half),
        `whole`."""
        for turn in range(number):
            document = self.documents[turn % NUM_SHARED]
            fresh = self.prompt()
            kept = {"cold": 0, "half": len(document) // 2, "whole": len(document)}[case]
            yield b"".join(document[:kept] + fresh[kept:])

    def _replica(self, number: int) -> Member:
        load = ReplicaLoad(
            num_running=self.rng.randrange(64),
            num_prefill_tokens=self.rng.randrange(4096),
            num_used_blocks=self.rng.randrange(5000),
            num_total_blocks=10_000,
            prefill_tps=12_000.0,
            itl_seconds=0.01,
            itl_seconds_per_request=0.0001,
        )
        replica_id = f"replica-{number}"
        address = f"127.0.0.1:{number}"
        return Member(
            kind=Kind.ENGINE,
            replica_id=replica_id,
            epoch=new_epoch(),
            address=address,
            model=self.model,
            load=load,
        )

    def _fill(self, member: Member, num_blocks: int) -> None:
        """Fills a replica's cache with parts of some documents and blocks of its own."""
        index = self.feed.index(self.model.key)
        column = index.open(member.replica_id, member.epoch)
        for document in self.documents:
            if self.rng.random() < 0.7:
                index.fill(column, document[: self.rng.randrange(1, len(document) + 1)])
        index.fill(column, (self.rng.randbytes(16) for _ in range(num_blocks - len(column.blocks))))
        index.publish(column, 1)

    async def measure(self, case: str, num_decisions: int) -> Measurement:
        # As a gateway does once it is up.
        gc.collect()
        gc.freeze()
        async with self.router.running():
            times = [
                timed_decision(self.router, self.model.key, hashes, self.num_tokens)
                for hashes in self.prompts(case, num_decisions)
            ]
        wall, cpu, sending = np.array(times).T * 1e6
        p50, p99, cpu_p50, cpu_p99 = (
            np.percentile([wall, cpu], (50, 99), axis=1).T.ravel().round(1).tolist()
        )
        return Measurement(
            case=case,
            block_size=self.block_size,
            num_blocks=self.num_tokens // self.block_size,
            num_replicas=len(self.members),
            index_blocks=len(self.feed.index(self.model.key)),
            p50_us=p50,
            p99_us=p99,
            cpu_p50_us=cpu_p50,
            cpu_p99_us=cpu_p99,
            dispatched_p50_us=round(float(np.median(sending)), 1),
        )


def main(
    num_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 8192,
    num_replicas: Annotated[int, typer.Option(help="Replicas of the model.")] = 32,
    blocks_per_replica: Annotated[
        int, typer.Option(help="Blocks that each replica caches.")
    ] = 10_000,
    decisions: Annotated[int, typer.Option(help="Decisions of each kind.")] = 500,
    as_json: AsJson = False,
) -> None:
    """Time of a routing decision."""
    configure_logging("bench", "warning")
    rows = []
    for block_size in (16, 64):
        for case in ("cold", "half", "whole"):
            bench = Bench(
                block_size=block_size,
                num_tokens=num_tokens,
                num_replicas=num_replicas,
                blocks_per_replica=blocks_per_replica,
            )
            rows.append(asyncio.run(bench.measure(case, decisions)))
    show_rows(rows, "a routing decision", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
