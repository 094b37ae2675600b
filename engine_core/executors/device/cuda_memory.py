"""Memory of a GPU's engine that sleep gives back: weights, of which the host keeps a locked copy,
and the KV cache. Graphs stay valid, since addresses stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from headwater.kernels.launch.device_memory import DeviceMemory, DriverError

from ...executor import MemoryShort
from .locked_memory import LockedMemory, mapped
from .placed_weights import HeldWeights, PlacedWeights

PIECE_BYTES = 1 << 30
"""Bytes of weights that are locked and copied at a time."""


class CudaMemory:
    """See `ReleasableMemory`."""

    keeps_cache = False

    def __init__(self, weights: PlacedWeights, held: HeldWeights | None) -> None:
        """`held`: keeps the weights beyond this process while the engine is awake; None: nobody
        does."""
        self._weights = weights
        self._held = held
        self._cache: DeviceMemory | None = None
        self._copies: list[LockedMemory] = []
        """Pieces of the weights in host memory; the later ones are yet to be copied."""

    def zeros(self, shape: tuple[int, int]) -> torch.Tensor:
        """The KV cache: uint8 of a shape. To be called once. Raises `DriverError`."""
        assert self._cache is None
        num_bytes = shape[0] * shape[1]
        self._cache = DeviceMemory(num_bytes)
        return self._cache.bytes[:num_bytes].zero_().view(shape)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._pieces)

    def copies(self) -> Iterator[Callable[[], object]]:
        """Preparations that copy the weights to the host piece by piece, so that the first sleep
        need not."""
        for i in range(self._num_pieces):
            yield partial(self._copy_up_to, i + 1)

    def release(self) -> int:
        self._copy_up_to(self._num_pieces)
        torch.cuda.synchronize()
        if self._held is not None:
            self._held.drop()
        for each in self._pieces:
            each.unmap()
        # Memory that torch keeps for activations between two steps.
        torch.cuda.empty_cache()
        return self.num_bytes

    @torch.inference_mode()
    def restore(self) -> None:
        done: list[DeviceMemory] = []
        try:
            for each in self._pieces:
                each.map()
                done.append(each)
        except DriverError as error:
            for each in done:
                each.unmap()
            if not error.is_out_of_memory:
                raise
            raise MemoryShort(self.num_bytes, torch.cuda.mem_get_info()[0]) from None
        for i, copy in enumerate(self._copies):
            self._piece(i).copy_(copy.memory, non_blocking=True)
        if self._cache is not None:
            # Positions after the end of a sequence are multiplied by zero, which is NaN for
            # infinities and NaN.
            self._cache.bytes.zero_()
        torch.cuda.synchronize()
        if self._held is not None:
            self._held.keep(self._weights)

    @property
    def _pieces(self) -> list[DeviceMemory]:
        weights = self._weights.memory
        return [weights] if self._cache is None else [weights, self._cache]

    @property
    def _num_pieces(self) -> int:
        return -(-self._weights.num_bytes // PIECE_BYTES)

    def _piece(self, i: int) -> torch.Tensor:
        return self._weights.bytes[i * PIECE_BYTES : (i + 1) * PIECE_BYTES]

    @torch.inference_mode()
    def _copy_up_to(self, num_pieces: int) -> None:
        for i in range(len(self._copies), num_pieces):
            piece = self._piece(i)
            copy = LockedMemory(mapped((piece.numel(),), torch.uint8))
            copy.memory.copy_(piece)
            self._copies.append(copy)
