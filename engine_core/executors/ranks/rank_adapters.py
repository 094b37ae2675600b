"""Adapters of an engine with several ranks: read and divided once, in memory that all ranks map;
each rank copies its part to its device."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

from headwater.kernels.adapters.slab import RANK_UNIT, Slab

from ...config import require
from ...executor import AdapterCopy, AdapterFacts, AdapterPlace, StepPlan
from ...layers.adapters.rank_part import RankPart
from ...layers.adapters.slab_layout import PackedAdapter, SlabLayout, check_layers
from ...models.model import model_class
from ...options import BuildRequest
from ...weights.adapters.peft_folder import read_adapter
from ...weights.model_file import DTYPES
from .rank import Rank, stages_of

_PAGE = 4096


class RankLayouts:
    """Layouts of adapters' slabs by rank: the rank's part of the model's layers, and where their
    factors lie."""

    def __init__(self, request: BuildRequest) -> None:
        """Raises `ConfigError` where the devices' memory for adapters is too small."""
        found = model_class(request.model)
        self.names = found.names
        self.whole = found.layout(request.model)
        options = request.options
        self.parts = [
            RankPart(self.whole, options.layout.shard(rank), stage)
            for stage in stages_of(request)
            for rank in range(options.layout.tensor)
        ]
        self.slabs = [SlabLayout(part.layout, DTYPES[request.dtype]) for part in self.parts]
        most = max(each.rank_bytes for each in self.slabs)
        num_bytes = options.adapter_memory
        self.num_ranks = num_bytes // (RANK_UNIT * most) * RANK_UNIT
        """Ranks of all adapters that each device holds at a time: that with the largest layers
        decides."""
        allowed = f"0, or {RANK_UNIT * most} bytes (an adapter of rank {RANK_UNIT}) and more"
        require(self.num_ranks, "adapter_memory", num_bytes, allowed)

    def slab(self, rank: int, device: torch.device) -> Slab:
        """Memory for adapters on the device of a rank."""
        layout = self.slabs[rank]
        return layout.slab(self.num_ranks * layout.rank_bytes, device)


class RankHostAdapters:
    """See `HostAdapters`. The parts of an adapter for all ranks are stored one after another."""

    def __init__(self, layouts: RankLayouts, memory: int) -> None:
        """`memory`: a descriptor of the memory that the ranks map."""
        self._layouts = layouts
        self._memory = memory
        self._whole = SlabLayout(layouts.whole, layouts.slabs[0].dtype)
        self._places: dict[bytes, AdapterPlace] = {}
        self._lock = threading.Lock()

    @property
    def num_ranks(self) -> int:
        return self._layouts.num_ranks

    @property
    def num_kept(self) -> int:
        """Number of adapters in host memory."""
        return len(self._places)

    def read(self, folder: Path) -> AdapterFacts:
        layouts = self._layouts
        adapter = read_adapter(folder, layouts.whole, layouts.names)
        check_layers(adapter, self._whole.layers)
        packed = [
            slab.pack(part.of(adapter))
            for slab, part in zip(layouts.slabs, layouts.parts, strict=True)
        ]
        num_ranks = packed[0].num_ranks
        allowed = f"at most {self.num_ranks}, which adapter_memory holds"
        require(num_ranks <= self.num_ranks, "rank of the adapter", adapter.rank, allowed)
        with self._lock:
            place = self._places.get(adapter.digest)
            if place is None:
                place = self._places[adapter.digest] = self._put(packed)
        return AdapterFacts(adapter.digest, adapter.rank, num_ranks, place.num_bytes)

    def drop(self, digest: bytes) -> None:
        with self._lock:
            self._places.pop(digest, None)

    def placed(self, copied: list[AdapterCopy]) -> list[AdapterCopy]:
        """The copies of a plan, with the places where ranks find them."""
        return [each._replace(place=self._places[each.digest]) for each in copied]

    def _put(self, packed: list[PackedAdapter]) -> AdapterPlace:
        """Writes an adapter into the first gap that it fits in."""
        stride = -(-max(each.num_bytes for each in packed) // _PAGE) * _PAGE
        begin = 0
        for place in sorted(self._places.values()):
            if place.begin - begin >= stride * len(packed):
                break
            begin = place.begin + place.num_bytes
        for i, each in enumerate(packed):
            at = begin + i * stride
            os.pwrite(self._memory, _bytes_of(each.numbers), at)
            os.pwrite(self._memory, _bytes_of(each.factors), at + each.numbers.nbytes)
        return AdapterPlace(begin, stride * len(packed), stride, packed[0].num_ranks)


class RankAdapters:
    """See `Adapters`: the part of one rank."""

    def __init__(self, slab: Slab, layout: SlabLayout, rank: int, memory: int) -> None:
        """`memory`: see `RankHostAdapters`."""
        self._slab = slab
        self._layout = layout
        self._rank = rank
        self._memory = memory

    @property
    def num_ranks(self) -> int:
        return self._slab.most_ranks

    def precede(self, plan: StepPlan) -> None:
        for copied in plan.copied_adapters:
            self._copy(copied)

    def _copy(self, copied: AdapterCopy) -> None:
        place = copied.place
        assert place is not None
        at = place.begin + self._rank * place.stride
        layout = self._layout
        numbers = self._read(at, place.num_ranks * layout.rank_numbers, layout.dtype)
        factors = self._read(at + numbers.nbytes, layout.num_projections, torch.float32)
        layout.copy(numbers, factors, place.num_ranks, self._slab, copied.slot)

    def _read(self, at: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of the memory, in locked pages where the device is a GPU: the allocator keeps
        them until the copy is made."""
        found = torch.empty(size, dtype=dtype, pin_memory=self._slab.numbers.is_cuda)
        os.preadv(self._memory, [_bytes_of(found)], at)
        return found


def rank_adapters(
    request: BuildRequest, rank: Rank, device: torch.device
) -> tuple[RankAdapters, Slab, SlabLayout]:
    """Memory for adapters of a rank on its device. Raises `ConfigError` where it is too small."""
    layouts = RankLayouts(request)
    number = rank.number(request.options.layout)
    slab = layouts.slab(number, device)
    layout = layouts.slabs[number]
    return RankAdapters(slab, layout, number, rank.adapters), slab, layout


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
