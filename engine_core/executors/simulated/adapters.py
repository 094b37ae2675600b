"""Adapters of a simulated executor: their content sets tokens apart, and no number of it is
read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...config import require
from ...executor import AdapterFacts, StepPlan
from ...weights.adapters.content import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    TENSORS_NAME,
    digest_of,
    read_file,
)
from ...weights.adapters.peft_config import config_of, object_of
from .hashes import UInt64Array

RANK_UNIT = 8
"""Ranks between the beginnings of two slots."""
MAX_TENSOR_BYTES = 1 << 30


def salt_of(digest: bytes) -> int:
    """Noise that sets answers with an adapter apart; 0 for none."""
    return int.from_bytes(digest[:8], "little")


class SimulatedAdapters:
    """See `HostAdapters`. Slots hold the noise of their adapters."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: memory for adapters, of which each rank of an adapter takes one byte."""
        self.num_ranks = num_bytes // RANK_UNIT * RANK_UNIT
        self._salts: UInt64Array = np.zeros(self.num_ranks // RANK_UNIT + 1, np.uint64)
        """Salts by slot. Rows without an adapter use the last one."""
        self._known: set[bytes] = set()

    def read(self, folder: Path) -> AdapterFacts:
        data = read_file(folder / CONFIG_NAME, MAX_CONFIG_BYTES)
        rank = config_of(object_of(bytes(data), CONFIG_NAME)).rank
        tensors = read_file(folder / TENSORS_NAME, MAX_TENSOR_BYTES)
        num_ranks = -(-rank // RANK_UNIT) * RANK_UNIT
        allowed = f"at most {self.num_ranks}, which adapter_memory holds"
        require(num_ranks <= self.num_ranks, "rank of the adapter", rank, allowed)
        digest = digest_of(data, tensors)
        self._known.add(digest)
        return AdapterFacts(digest, rank, num_ranks, len(tensors))

    def drop(self, digest: bytes) -> None:
        self._known.discard(digest)

    def precede(self, plan: StepPlan) -> None:
        for slot, digest, _ in plan.copied_adapters:
            assert digest in self._known
            self._salts[slot] = salt_of(digest)

    def noise_of(self, slots: np.ndarray) -> UInt64Array:
        """Noise of the adapters that are in these slots now."""
        noise: UInt64Array = self._salts[slots]
        return noise
