"""Blocks on their way from the device to a disk: through slots of host memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...executor import Swapper, SwapPlan
from ..block_source import Owner
from ..value.tier_order import GivenBack


@dataclass(slots=True, eq=False)
class SavedChain:
    """Blocks of a chain that were given back together. They are held in the disk's order until all
    are written, so that they are evicted together."""

    given: GivenBack
    hashes: list[bytes]
    """Blocks that the disk has or writes, from first to last."""
    num_unwritten: int


@dataclass(slots=True, eq=False)
class DiskSave:
    """A block that is being written to the disk."""

    owner: Owner
    block_hash: bytes
    parent: bytes
    slot: int
    chain: SavedChain


class DiskSaves:
    def __init__(self, swapper: Swapper, free_slots: deque[int]) -> None:
        """`free_slots` of the swapper are shared with loads."""
        self._swapper = swapper
        self._free_slots = free_slots
        self._most = max(1, len(swapper.slots) // 2)
        """Slots that saves may have: loads find the others free."""
        self._saving: dict[bytes, DiskSave] = {}
        self._leaving: deque[DiskSave] = deque()
        """Blocks that are being copied to their slots, in the swapper's order."""
        self._asked: list[tuple[DiskSave, int]] = []
        """Saves since the last launch, each with its KV block."""
        self._num_copied = 0

    def __len__(self) -> int:
        return len(self._saving)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._saving

    @property
    def num_free_slots(self) -> int:
        """Slots that further saves may have."""
        return min(self._most - len(self._saving), len(self._free_slots))

    def begin(self, owner: Owner, block_hash: bytes, parent: bytes, chain: SavedChain) -> DiskSave:
        """Takes a slot for a block."""
        save = DiskSave(owner, block_hash, parent, self._free_slots.popleft(), chain)
        self._saving[block_hash] = save
        return save

    def ask(self, saves: list[tuple[DiskSave, int]]) -> None:
        """Has KV blocks copied to their slots with the next launch. The block that is written last
        is kept longest."""
        self._asked += reversed(saves)

    def launch(self) -> None:
        if not self._asked:
            return
        pairs = np.array([(block, save.slot) for save, block in self._asked], np.int32)
        self._leaving += (save for save, _ in self._asked)
        self._asked.clear()
        self._swapper.swap(SwapPlan(out_blocks=pairs[:, 0].copy(), out_slots=pairs[:, 1].copy()))

    def take_copied(self) -> list[DiskSave]:
        """Saves whose blocks are in their slots now."""
        num_copied = self._swapper.num_saved
        taken = [self._leaving.popleft() for _ in range(num_copied - self._num_copied)]
        self._num_copied = num_copied
        return taken

    def end(self, save: DiskSave) -> None:
        """Gives back the slot of a save, whether it was written or failed."""
        del self._saving[save.block_hash]
        self._free_slots.append(save.slot)
        save.chain.num_unwritten -= 1
