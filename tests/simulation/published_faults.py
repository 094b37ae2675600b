"""Seeded schedules of an engine that publishes the blocks of its KV cache and of a reader that
copies them, of which either goes on between any two reads and writes of the other: what a reader
takes for a block has its contents.

`python -m tests.simulation.published_faults --seeds 100000`; one seed takes the same steps every
time.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from headwater.bench.program import run_program
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.published_blocks import PublishedBlocks
from tests.simulation.peer_twins import RacedView
from tests.simulation.seeds import First, Seeds, run_seeds

NUM_BLOCKS = 9
NUM_PREFIXES = 3
PREFIX_LEN = 3
HASHES = [[bytes([prefix, at]) * 8 for at in range(PREFIX_LEN)] for prefix in range(NUM_PREFIXES)]


class SlowMemory:
    """Memory that is written word by word, when a queue of writes gets there."""

    def __init__(self, memory: memoryview[int], writes: deque[Callable[[], None]]) -> None:
        self._memory = memory
        self._writes = writes

    def __setitem__(self, at: int | slice[int, int, None], value: int | bytes) -> None:
        for place, word in self._words(at, value):
            self._writes.append(partial(self._memory.__setitem__, place, word))

    def _words(
        self, at: int | slice[int, int, None], value: int | bytes
    ) -> Iterator[tuple[Any, Any]]:
        if isinstance(at, int):
            yield at, value
            return
        assert isinstance(value, bytes)
        for start in range(0, len(value), 8):
            yield slice(at.start + start, at.start + start + 8), value[start : start + 8]


class SlowlyPublished(PublishedBlocks):
    """Readers see what was written so far."""

    def __init__(self, pool: BlockPool, owner: Owner) -> None:
        super().__init__(pool, owner)
        self.writes = deque[Callable[[], None]]()
        """Writes that are due, in their order. The owner does nothing else before they are done."""
        self._hashes = SlowMemory(self._hashes, self.writes)  # type: ignore[assignment]
        self._stamps = SlowMemory(self._stamps, self.writes)  # type: ignore[assignment]


@dataclass(slots=True)
class Owner:
    """An incarnation of an engine: its pool, and what its device has written."""

    rng: random.Random
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    contents: list[bytes] = field(default_factory=lambda: [b""] * NUM_BLOCKS)
    num_steps: int = 0
    num_retired: int = 0
    in_flight: deque[tuple[int, list[int], list[bytes]]] = field(default_factory=deque)
    """Number, blocks and hashes of each step; its device writes the contents at any time until it
    is retired."""
    published: SlowlyPublished = field(init=False)

    def __post_init__(self) -> None:
        self.published = SlowlyPublished(self.pool, self)

    @property
    def youngest(self) -> int:
        return self.num_steps if self.in_flight else 0

    def last_to_compute(self, hashes: Collection[bytes]) -> int:
        raise NotImplementedError("nothing is lent here")

    def act(self) -> None:
        """Plans a step, lets the device write, retires a step, or goes on with one of these."""
        if self.published.writes:
            self.published.writes.popleft()()
            return
        self.rng.choice([self._plan, self._write, self._write, self._retire])()

    def _plan(self) -> None:
        """Plans a step that computes a prefix into free blocks."""
        hashes = self.rng.choice(HASHES)[: self.rng.randint(1, PREFIX_LEN)]
        if self.pool.num_free < len(hashes) or len(self.in_flight) > 2:
            return
        blocks = self.pool.allocate(len(hashes))
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.cache(block, block_hash)
        self.num_steps += 1
        self.in_flight.append((self.num_steps, blocks, list(hashes)))
        self.published.advance(self.num_retired)

    def _write(self) -> None:
        for _, blocks, hashes in self.in_flight:
            at = self.rng.randrange(len(blocks))
            self.contents[blocks[at]] = hashes[at]

    def _retire(self) -> None:
        if self.in_flight:
            self.num_retired, blocks, hashes = self.in_flight.popleft()
            for block, block_hash in zip(blocks, hashes, strict=True):
                self.contents[block] = block_hash
            self.pool.release(blocks)
            self.published.advance(self.num_retired)


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.owner = Owner(self.rng)
        self.dead = list[Owner]()
        self.num_copied = self.num_changed = 0

    def run(self) -> None:
        for _ in range(self.rng.randint(0, 2)):
            self._age()
            self.dead.append(self.owner)
            self.owner = Owner(self.rng)
        self._age()
        if (view := self._open()) is None:
            return
        for _ in range(6):
            self._read(view)
            self._age()

    def _age(self) -> None:
        for _ in range(self.rng.randrange(20)):
            self.owner.act()

    def _open(self) -> RacedView | None:
        """A view of what the owner publishes. Its handle may lead to the memory of a
        predecessor."""
        handle = self.owner.published.handle
        if self.dead and self.rng.random() < 0.5:
            found = json.loads(self.rng.choice(self.dead).published.handle)
            handle = json.dumps(found | {"token": json.loads(handle)["token"]}).encode()
        try:
            return RacedView(handle, self._race)
        except OSError:
            assert handle != self.owner.published.handle, "the owner's own memory is not found"
            return None

    def _race(self) -> None:
        for _ in range(self.rng.choice([0, 0, 1, 4, 16])):
            self.owner.act()

    def _read(self, view: RacedView) -> None:
        hashes = self.rng.choice(HASHES)
        found = view.find(hashes)
        copied = list[bytes]()
        for block in found.blocks.tolist():
            self._race()
            copied.append(self.owner.contents[block])
        self._race()
        num_unchanged = view.num_unchanged(found)
        self.num_copied += len(copied)
        self.num_changed += len(copied) - num_unchanged
        assert copied[:num_unchanged] == hashes[:num_unchanged], "a block has other contents"


class Outcome(NamedTuple):
    """Numbers of blocks that a seed saw."""

    num_copied: int
    num_changed: int
    """Blocks that did not count once they had been copied."""


def run_seed(seed: int) -> Outcome:
    """Raises `AssertionError`."""
    run = Run(seed)
    run.run()
    return Outcome(run.num_copied, run.num_changed)


def main(seeds: Seeds = 2000, first: First = 0) -> None:
    """Run seeds one after another; the first that breaks ends it."""
    run_seeds(run_seed, first, seeds, summary)


def summary(outcomes: list[Outcome]) -> str:
    num_copied, num_changed = (sum(each) for each in zip(*outcomes, strict=True))
    return f"{num_copied} blocks, {num_changed} of them changed"


if __name__ == "__main__":
    run_program(main)
