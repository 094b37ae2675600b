"""Cached blocks in host memory: where more fits than on the device, and from where they come back sooner than computed.

A block is copied when nobody holds it any more; that is long before it is taken for something else, unless running
requests have nearly all blocks. One that a prompt begins with is brought back into the prefix cache before the prompt
is seated. Knows hashes, blocks and slots; knows nothing about requests or how copies are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.prefix_cache import HashChain


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """Blocks on their way back."""

    ticket: int
    held: list[int]
    """The blocks before them, which must not go meanwhile."""
    hashes: list[bytes]
    blocks: list[int]


class HostTier:
    """Slots of host memory, each with a copy of a cached block; the least recently used goes first."""

    def __init__(self, pool: BlockPool, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_saved = self.num_loaded = 0
        """Blocks whose copies were launched, and those that came back, so far."""
        self._pool = pool
        self._slot_of: dict[bytes, int] = {}
        """In order of use."""
        self._free_slots = deque(range(num_slots))
        self._loads: deque[_Load] = deque()
        self._num_asked = 0
        """Blocks that loads asked for so far."""
        self._tickets: dict[bytes, int] = {}
        """Of what is on its way back; its slots stay."""
        self._saves: list[tuple[int, int]] = []
        self._fetches: list[tuple[int, int]] = []
        pool.elsewhere = self._slot_of

    @property
    def num_used_slots(self) -> int:
        return len(self._slot_of)

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def release(self, blocks: Sequence[int]) -> None:
        """Lets go of a sequence's blocks, given from first to last; what nobody holds now is copied, unless it is."""
        self._pool.release(blocks)
        if self.num_slots:
            self._save([block for block in blocks if self._pool.ref_counts[block] == 0])

    def find(self, chain: HashChain, start: int, end: int) -> list[int]:
        """Slots of the chain's blocks from `start` on, up to `end` or the first that is not here."""
        slots = []
        for block_hash in chain.hashes[start:end] if self._slot_of else ():
            slot = self._slot_of.get(block_hash)
            if slot is None or block_hash in self._tickets:
                break
            slots.append(slot)
        return slots

    def load(self, chain: HashChain, hits: list[int], slots: list[int]) -> int:
        """Takes blocks for what `slots` hold, the chain's blocks behind its `hits`, and plans the copies. Returns what
        `finish_loads` has to reach."""
        hashes = chain.hashes[len(hits) : len(hits) + len(slots)]
        # Before others are taken: these may be free.
        self._pool.share(hits)
        blocks = self._pool.allocate(len(slots))
        self._fetches += zip(slots, blocks, strict=True)
        self._num_asked += len(slots)
        self._tickets |= dict.fromkeys(hashes, self._num_asked)
        self._loads.append(_Load(ticket=self._num_asked, held=hits, hashes=hashes, blocks=blocks))
        return self._num_asked

    def ticket(self, block_hash: bytes) -> int | None:
        """Of the load that brings this block, if one does."""
        return self._tickets.get(block_hash)

    def finish_loads(self, num_loaded: int) -> bool:
        """Of all blocks asked for, the first `num_loaded` are there. Whether a load is whole now: its blocks can be
        hit, and nobody holds them."""
        self.num_loaded = num_loaded
        is_any = False
        while self._loads and self._loads[0].ticket <= num_loaded:
            load, is_any = self._loads.popleft(), True
            for block_hash, block in zip(load.hashes, load.blocks, strict=True):
                del self._tickets[block_hash]
                self._pool.cache(block, block_hash)
            self._touch(load.hashes)
            self._pool.release(load.blocks)
            self.release(load.held)
        return is_any

    def take_plan(self) -> SwapPlan | None:
        """What is to be copied since the last call."""
        if not (self._saves or self._fetches):
            return None
        saves, self._saves = np.array(self._saves, np.int32).reshape(-1, 2), []
        fetches, self._fetches = np.array(self._fetches, np.int32).reshape(-1, 2), []
        return SwapPlan(
            out_blocks=saves[:, 0].copy(),
            out_slots=saves[:, 1].copy(),
            in_slots=fetches[:, 0].copy(),
            in_blocks=fetches[:, 1].copy(),
        )

    def _save(self, blocks: list[int]) -> None:
        hash_of, slot_of = self._pool.hash_of, self._slot_of
        hashed = [(block_hash, block) for block in blocks if (block_hash := hash_of(block)) is not None]
        known = [block_hash for block_hash, _ in hashed if block_hash in slot_of]
        self._touch(known)
        fresh = [(block_hash, block) for block_hash, block in hashed if block_hash not in slot_of]
        # Where there are too few slots, the first blocks are worth most. In order, neighbours are one copy.
        slots = sorted(self._take_slots(len(fresh), set(known)))
        placed = [(block_hash, block, slot) for (block_hash, block), slot in zip(fresh, slots, strict=False)]
        for block_hash, _, slot in reversed(placed):
            slot_of[block_hash] = slot
        self._saves += ((block, slot) for _, block, slot in placed)
        self.num_saved += len(placed)

    def _take_slots(self, count: int, kept: set[bytes]) -> list[int]:
        """As many as can be had without those of hashes that are kept."""
        if (missing := count - len(self._free_slots)) > 0:
            stay = kept | self._tickets.keys()
            for block_hash in list(islice((each for each in self._slot_of if each not in stay), missing)):
                self._free_slots.append(self._slot_of.pop(block_hash))
                self._pool.note_gone(block_hash)
        return [self._free_slots.popleft() for _ in range(min(count, len(self._free_slots)))]

    def _touch(self, hashes: list[bytes]) -> None:
        """The first of a sequence was used last."""
        for block_hash in reversed(hashes):
            self._slot_of[block_hash] = self._slot_of.pop(block_hash)
