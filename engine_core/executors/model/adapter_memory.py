"""Adapters in host memory, and their copies in the slots of a device."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from headwater.kernels.adapters.slab import Slab

from ...config import require
from ...executor import AdapterCopy, AdapterFacts, StepPlan
from ...layers.adapters.slab_layout import PackedAdapter, SlabLayout, check_layers
from ...weights.adapters.peft_folder import read_adapter
from ...weights.layout import Layout
from ...weights.names import CheckpointNames


class NoAdapterMemory:
    """See `Adapters`: a device without slots."""

    def precede(self, plan: StepPlan) -> None:
        assert not plan.copied_adapters


class AdapterMemory:
    """See `HostAdapters` and `Adapters`."""

    def __init__(
        self, slab: Slab, layout: SlabLayout, model_layout: Layout, names: CheckpointNames
    ) -> None:
        self._slab = slab
        self._layout = layout
        self._model_layout = model_layout
        self._names = names
        self._packed: dict[bytes, PackedAdapter] = {}
        self._lock = threading.Lock()

    @property
    def num_ranks(self) -> int:
        return self._slab.most_ranks

    @property
    def num_kept(self) -> int:
        """Number of adapters in host memory."""
        return len(self._packed)

    def read(self, folder: Path) -> AdapterFacts:
        adapter = read_adapter(folder, self._model_layout, self._names)
        check_layers(adapter, self._layout.layers)
        packed = self._layout.pack(adapter, is_pinned=self._slab.numbers.is_cuda)
        allowed = f"at most {self.num_ranks}, which adapter_memory holds"
        require(packed.num_ranks <= self.num_ranks, "rank of the adapter", adapter.rank, allowed)
        with self._lock:
            kept = self._packed.setdefault(adapter.digest, packed)
        return AdapterFacts(adapter.digest, adapter.rank, kept.num_ranks, kept.num_bytes)

    def drop(self, digest: bytes) -> None:
        with self._lock:
            self._packed.pop(digest, None)

    def precede(self, plan: StepPlan) -> None:
        for copied in plan.copied_adapters:
            self._copy(copied)

    def _copy(self, copied: AdapterCopy) -> None:
        packed = self._packed[copied.digest]
        self._layout.copy(packed.numbers, packed.factors, packed.num_ranks, self._slab, copied.slot)


def adapter_memory(
    num_bytes: int,
    model_layout: Layout,
    names: CheckpointNames,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[AdapterMemory, Slab, SlabLayout]:
    """Memory for adapters of a model on its device. Raises `ConfigError` where it is too small."""
    layout = SlabLayout(model_layout, dtype)
    slab = layout.slab(num_bytes, device)
    return AdapterMemory(slab, layout, model_layout, names), slab, layout
