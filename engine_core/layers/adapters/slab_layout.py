"""Layers of a model that can have adapters, the offsets of their factors in a slot of device
memory, and adapters packed for that memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from headwater.kernels.adapters.slab import MAX_RANK, RANK_UNIT, Slab, SlabLayer, of_layer

from ...config import ConfigError, require
from ...weights.adapters.adapter import Adapter, LowRank, is_finite
from ...weights.layout import Layout, WeightSpec

_PACKING_THREADS = 4
_WORDS = {2: torch.int16, 4: torch.int32}
"""Keyed by bytes of a number."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory as a slab holds it."""

    numbers: torch.Tensor
    """[padded rank * numbers of a rank] in the model's dtype, layer by layer."""
    factors: torch.Tensor
    """float32 [projections]"""
    num_ranks: int
    """Rank of the adapter, padded."""

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes + self.factors.nbytes


class SlabLayout:
    """Places of the factors of a model's layers."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.layers: dict[str, SlabLayer] = {}
        first = column = 0
        for name, spec in layout.items():
            if takes_adapters(name, spec):
                parts = spec.parts or (spec.shape[0],)
                layer = self.layers[name] = SlabLayer(spec.shape[1], parts, first, column)
                first = layer.end
                column += len(parts)
        self.rank_numbers = first
        """Number of values of an adapter for each of its ranks, over all layers."""
        self.num_projections = column

    @property
    def rank_bytes(self) -> int:
        """Bytes of these numbers."""
        return self.rank_numbers * self.dtype.itemsize

    def slab(self, num_bytes: int, device: torch.device) -> Slab:
        """Memory for adapters on a device, of so many bytes or a little less. Raises `ConfigError`
        where an adapter of rank `RANK_UNIT` does not fit."""
        num_slots = num_bytes // (RANK_UNIT * self.rank_bytes)
        least = RANK_UNIT * self.rank_bytes
        allowed = f"0, or {least} bytes (an adapter of rank {RANK_UNIT}) and more"
        require(num_slots > 0, "adapter_memory", num_bytes, allowed)
        return Slab(
            torch.zeros(num_slots * RANK_UNIT * self.rank_numbers, dtype=self.dtype, device=device),
            torch.zeros(num_slots, dtype=torch.int32, device=device),
            torch.zeros(num_slots, self.num_projections, device=device),
        )

    def pack(self, adapter: Adapter, *, is_pinned: bool = False) -> PackedAdapter:
        """Raises `ConfigError` for numbers that the model's dtype does not hold."""
        num_ranks = padded_rank(adapter.rank)
        # Zeros below numbers that are written anyway take a third of the time.
        allocate = torch.empty if self._fills(adapter) else torch.zeros
        numbers = allocate(num_ranks * self.rank_numbers, dtype=self.dtype, pin_memory=is_pinned)
        factors = torch.zeros(self.num_projections, pin_memory=is_pinned)
        packed = PackedAdapter(numbers, factors, num_ranks)
        with ThreadPoolExecutor(_PACKING_THREADS, "pack") as threads:
            written = [
                threads.submit(self._write, packed, *key, each)
                for key, each in adapter.projections.items()
            ]
        for each in written:
            each.result()
        tensors = (each for low_rank in adapter.projections.values() for each in low_rank.tensors)
        # What is of the model's dtype was judged when it was read.
        finite = all(each.dtype == self.dtype for each in tensors) or is_finite(numbers)
        finite = finite and bool(factors.isfinite().all())
        require(finite, "adapter", "numbers out of range", f"numbers that {self.dtype} holds")
        return packed

    def _write(self, packed: PackedAdapter, name: str, part: int, low_rank: LowRank) -> None:
        layer = self.layers[name]
        of_ranks = _words(of_layer(packed.numbers, packed.num_ranks, layer))
        rank, num_inputs = low_rank.a.shape
        first_a = part * num_inputs
        of_ranks[:rank, first_a : first_a + num_inputs] = _words(low_rank.a.to(self.dtype))
        first_b = layer.first_b + layer.part_starts[part]
        of_ranks[:rank, first_b : first_b + layer.parts[part]] = _words(low_rank.b.to(self.dtype)).T
        packed.factors[layer.column + part] = low_rank.factor

    def _fills(self, adapter: Adapter) -> bool:
        """Whether it has a number in each place of every projection's ranks."""
        num_ranks = padded_rank(adapter.rank)
        is_whole = all(len(each.a) == num_ranks for each in adapter.projections.values())
        has_gaps = any(each.first_b + each.num_outputs < each.size for each in self.layers.values())
        return is_whole and len(adapter.projections) == self.num_projections and not has_gaps

    def copy(
        self, numbers: torch.Tensor, factors: torch.Tensor, num_ranks: int, slab: Slab, slot: int
    ) -> None:
        """Copies an adapter of so many ranks, packed as `pack` does, to its slot; from locked
        memory without waiting."""
        first = slot * RANK_UNIT
        copy = _copy_bytes if slab.numbers.device.type == "cpu" else _begin_copy
        for layer in self.layers.values():
            target = slab.of(layer)[first : first + num_ranks]
            copy(of_layer(numbers, num_ranks, layer), target)
        slab.factors[slot].copy_(factors, non_blocking=True)
        slab.num_ranks[slot] = num_ranks


def _words(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The numbers as integers of their size, which numpy copies on one thread; see
    `_copy_bytes`."""
    return tensor.view(_WORDS[tensor.dtype.itemsize]).numpy()


def _copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies on one thread: where all cores are busy, torch's threads wait for one another in each
    of some hundred copies, which together take as long as a step."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _begin_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def padded_rank(rank: int) -> int:
    """Ranks that an adapter takes of a slab."""
    assert rank <= MAX_RANK
    return -(-rank // RANK_UNIT) * RANK_UNIT


def takes_adapters(name: str, spec: WeightSpec) -> bool:
    """Whether it is a linear layer of every token: no head, router or expert."""
    is_layer = name.startswith("layers.") and spec.is_linear
    return is_layer and not spec.num_experts and not spec.is_routing


def check_layers(adapter: Adapter, layers: Mapping[str, SlabLayer]) -> None:
    """Raises `ConfigError` for a projection of a layer that takes no adapters."""
    for name, _ in adapter.projections:
        if name not in layers:
            raise ConfigError("adapter of layer", name, "linear layers of every token")
