"""Which adapters lie in the device's slots: each in a range of ranks. Adapters of running requests
stay for as long as a step may read them; of the others the least recently used is replaced
first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ...executor import NO_ADAPTER, AdapterCopy
from .slot_shares import SlotShares

RANK_UNIT = 8
"""Ranks between the beginnings of two slots; that of `kernels.adapters.slab`, which needs torch."""
NO_DIGEST = b""
"""Hash of the adapter of a request that has none."""


@dataclass(slots=True)
class _Resident:
    """An adapter on the device."""

    slot: int
    num_slots: int
    num_requests: int = 0


class AdapterSlots:
    def __init__(self, num_ranks: int) -> None:
        """`num_ranks`: ranks of the device's memory; 0: it takes no adapters."""
        self._num_slots = num_ranks // RANK_UNIT
        self._known: dict[bytes, int] = {}
        """Slots that each adapter takes."""
        self._resident: OrderedDict[bytes, _Resident] = OrderedDict()
        """Resident adapters by hash, the most recently used last."""
        self._copies: list[AdapterCopy] = []
        self.shares = SlotShares()
        self.num_copied = 0
        """Copies to the device so far."""

    def add(self, digest: bytes, num_ranks: int) -> None:
        """Notes an adapter that plans may copy."""
        assert num_ranks <= self._num_slots * RANK_UNIT
        self._known[digest] = num_ranks // RANK_UNIT

    def remove(self, digest: bytes) -> bool:
        """Forgets an adapter, unless a step in flight may read it. Whether it is forgotten."""
        resident = self._resident.get(digest)
        if resident is not None and resident.num_requests:
            return False
        self._resident.pop(digest, None)
        self._known.pop(digest, None)
        self._copies = [each for each in self._copies if each.digest != digest]
        return True

    def knows(self, digest: bytes) -> bool:
        """Whether requests may have the adapter; all may have none."""
        return digest == NO_DIGEST or digest in self._known

    @property
    def resident(self) -> list[bytes]:
        """Hashes of adapters on the device, the least recently used first."""
        return list(self._resident)

    def fits(self, digest: bytes, tenant: str) -> bool:
        """Whether the adapter of a tenant's request is in use, or fits beside those of running
        requests, and no tenant with fewer slots waits for one."""
        if digest == NO_DIGEST:
            return True
        resident = self._resident.get(digest)
        is_used = resident is not None and resident.num_requests > 0
        if not is_used and not self.shares.may_take(tenant):
            return False
        if resident is not None:
            return True
        used = (each for each in self._resident.values() if each.num_requests)
        return self._gap(used, self._known[digest]) is not None

    def seat(self, digest: bytes, tenant: str) -> int:
        """Slot of the adapter of a request that fits and takes a row; the adapter is copied with
        the next plan unless it is there."""
        if digest == NO_DIGEST:
            return NO_ADAPTER
        resident = self._resident.get(digest) or self._copy(digest)
        self._resident.move_to_end(digest)
        resident.num_requests += 1
        self.shares.take(tenant, digest, resident.num_slots)
        return resident.slot

    def copy_ahead(self, digest: bytes, tenant: str) -> None:
        """Copies the adapter of a waiting request with the next plan, if there is a free slot and
        the plan copies no other adapter, so that a step does not take longer."""
        if digest not in self._resident and not self._copies and self.fits(digest, tenant):
            self._copy(digest)

    def leave(self, digest: bytes, tenant: str) -> None:
        """Notes that no step in flight lists a request with the adapter any more."""
        if digest == NO_DIGEST:
            return
        resident = self._resident[digest]
        resident.num_requests -= 1
        self.shares.leave(tenant, digest, resident.num_slots)

    def take_copies(self) -> list[AdapterCopy]:
        """Copies that go with the next plan."""
        taken = self._copies
        self._copies = []
        return taken

    def _copy(self, digest: bytes) -> _Resident:
        resident = self._resident[digest] = self._place(self._known[digest])
        self._copies.append(AdapterCopy(resident.slot, digest))
        self.num_copied += 1
        return resident

    def _place(self, num_slots: int) -> _Resident:
        """Room for an adapter; as many unused ones as necessary leave the device."""
        while (slot := self._gap(self._resident.values(), num_slots)) is None:
            unused = (each for each in self._resident if not self._resident[each].num_requests)
            del self._resident[next(unused)]
        return _Resident(slot, num_slots)

    def _gap(self, taken: Iterable[_Resident], num_slots: int) -> int | None:
        """The first of so many free slots in a row; None: there are not so many."""
        begin = 0
        for each in sorted(taken, key=lambda each: each.slot):
            if each.slot - begin >= num_slots:
                return begin
            begin = each.slot + each.num_slots
        return begin if self._num_slots - begin >= num_slots else None
