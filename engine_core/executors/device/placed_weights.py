"""Weights of a model in one allocation of a GPU's memory, which may outlive this process: a holder
process keeps the memory and the table of its tensors, and a restarted engine maps both."""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from headwater.kernels.launch.device_memory import DeviceMemory, DriverError, can_share

from ...layers.linear.kinds import Weights
from ...system.held_memory import HeldMemory, MemoryHolder
from .moved_tensors import move, num_bytes_of, tensors_of

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """All weights of an engine on one GPU."""

    served: Weights
    draft: Weights | None
    """Weights of the model that drafts."""
    heads: Weights | None


class PlacedWeights:
    """The memory of weights, and the range of it that is in use."""

    def __init__(self, memory: DeviceMemory, num_bytes: int) -> None:
        self.memory = memory
        self.num_bytes = num_bytes

    @classmethod
    def of(cls, weights: object, *, is_shared: bool = False) -> PlacedWeights:
        """Moves the weights, which nothing has been made of yet that names their addresses. Raises
        `DriverError`."""
        tensors = on_device(weights)
        num_bytes = num_bytes_of(tensors)
        memory = DeviceMemory(num_bytes, is_shared=is_shared)
        move(tensors, memory.bytes)
        # Gives freed memory back to the device, for other processes.
        torch.cuda.empty_cache()
        return cls(memory, num_bytes)

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [num_bytes]"""
        return self.memory.bytes[: self.num_bytes]


class HeldWeights:
    """Weights that a holder keeps beyond this process."""

    def __init__(self, holder: MemoryHolder, key: str) -> None:
        """`key`: equal keys have equal weights, in the same layout."""
        self._holder = holder
        self._key = key
        self.were_held = False
        """Whether the weights in use stayed on the device from an earlier process."""
        self.num_bytes = 0
        """Bytes that the holder has."""
        self._layout = b""
        self._checksum = 0

    def taken_or(self, load: Callable[[], T]) -> tuple[T, PlacedWeights | None]:
        """The weights that are held, or those that `load` makes, which are held from now on. None:
        this device has no room for that, or its memory cannot be held."""
        if (held := self._holder.take(self._key)) is not None:
            with closing(held):
                if (placed := _mapped(held)) is not None:
                    log.info("weights: %.1f GB were held on the device", held.num_bytes / 1e9)
                    self.were_held = True
                    self._checksum = held.checksum
                    size = os.fstat(held.layout).st_size
                    self._layout = os.pread(held.layout, size, 0)
                    self.num_bytes = held.num_bytes
                    found: T = weights_at(self._layout, placed.bytes)
                    return found, placed
        self._holder.drop()
        weights = load()
        if why := _why_not(weights):
            log.warning("weights are not held on the device: %s", why)
            return weights, None
        placed = PlacedWeights.of(weights, is_shared=True)
        self._layout = layout_of(weights, placed.bytes)
        self._checksum = checksum(placed.bytes)
        self.keep(placed)
        return weights, placed

    def keep(self, placed: PlacedWeights) -> None:
        """Hands the memory to the holder; it has the contents that it had when the weights were
        placed there."""
        with os.fdopen(os.memfd_create("weights"), "wb", 0) as layout:
            layout.write(self._layout)
            memory = placed.memory.export()
            with closing(os.fdopen(memory, "rb", 0)):
                held = HeldMemory(
                    memory=memory,
                    layout=layout.fileno(),
                    num_bytes=placed.num_bytes,
                    checksum=self._checksum,
                )
                is_held = self._holder.keep(self._key, held)
                self.num_bytes = placed.num_bytes if is_held else 0

    def drop(self) -> None:
        """Makes the holder release the memory as soon as it is unmapped here."""
        self._holder.drop()
        self.num_bytes = 0


def on_device(weights: object) -> list[torch.Tensor]:
    return [each for each in tensors_of(weights) if each.is_cuda]


def _why_not(weights: object) -> str:
    """Why weights cannot be held; empty: they can."""
    if not can_share():
        return "the GPU's driver exports no memory"
    num_bytes = num_bytes_of(on_device(weights))
    free, _ = torch.cuda.mem_get_info()
    if num_bytes > free:
        return f"they are moved, and {free / 1e9:.1f} GB are free beside {num_bytes / 1e9:.1f} GB"
    return ""


def _mapped(held: HeldMemory) -> PlacedWeights | None:
    """None: the memory cannot be mapped, or is not as it was left: a device may have written to it
    as its process died."""
    try:
        memory = DeviceMemory(held.num_bytes, exported=held.memory)
    except DriverError as error:
        log.warning("held weights cannot be mapped: %s", error)
        return None
    placed = PlacedWeights(memory, held.num_bytes)
    if checksum(placed.bytes) == held.checksum:
        return placed
    log.warning("held weights were written to; they are loaded again")
    memory.unmap()
    return None


def checksum(memory: torch.Tensor) -> int:
    """Sum of the words of memory, uint8 [N], N a multiple of 8: in any order the same."""
    return int(memory.view(torch.int64).sum())


def layout_of(weights: object, memory: torch.Tensor) -> bytes:
    """The weights without the bytes of tensors that lie in the memory."""
    file = io.BytesIO()
    _LayoutPickler(file, memory).dump(weights)
    return file.getvalue()


def weights_at(layout: bytes, memory: torch.Tensor) -> Any:
    """The weights of a layout, whose tensors lie in the memory."""
    return _LayoutUnpickler(io.BytesIO(layout), memory).load()


class _LayoutPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: torch.Tensor) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._storage = memory.untyped_storage().data_ptr()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.untyped_storage().data_ptr() != self._storage:
            return None
        # With its own id: a tensor of two names is one tensor again.
        return id(obj), obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride()


class _LayoutUnpickler(pickle.Unpickler):
    """Reads what an engine of the same user and version has written, under the same key."""

    def __init__(self, file: io.BytesIO, memory: torch.Tensor) -> None:
        super().__init__(file)
        self._memory = memory
        self._found: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, dtype, offset, shape, stride = pid
        if number not in self._found:
            tensor = torch.empty(0, dtype=dtype, device=self._memory.device)
            tensor.set_(self._memory.untyped_storage(), offset, shape, stride)
            self._found[number] = tensor
        return self._found[number]
