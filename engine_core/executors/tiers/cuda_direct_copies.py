"""KV blocks out of the memory of another engine on a GPU of this host, beside the steps: one kernel
reads them over the links between the GPUs and writes them where they belong."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headwater.kernels.blocks.pull_blocks import pull_blocks
from headwater.kernels.launch.device import upload
from headwater.kernels.peer.peer_memory import PeerError, close_address, handle_of, open_address

from ...executor import Int32Array
from ...system.process_memory import host_id

ASSUMED_BYTES_PER_SECOND = 100e9
"""Speed of a copy between GPUs before one was measured; other copies use the same links."""
Protect = Callable[[torch.cuda.Stream, Int32Array], None]


@dataclass(slots=True, eq=False)
class CudaDirectCopy:
    """See `DirectCopy`."""

    event: torch.cuda.Event

    @property
    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch ships it so


@dataclass(slots=True, eq=False)
class _Opened:
    """Memory of another engine that is mapped here."""

    bases: list[int]
    """Address of each piece that was opened."""
    caches: list[tuple[int, int]]
    """Address and number of blocks of each KV cache."""


class CudaDirectCopies:
    """See `DirectCopies`."""

    def __init__(self, planes: Sequence[torch.Tensor], protect: Protect) -> None:
        """planes int32 [layers x 2, num_blocks, words] of each model whose keys and values a block
        has. `protect` has a stream wait for whatever still reads blocks that it will write."""
        self._planes = planes
        self._protect = protect
        self._device = planes[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch ships it so
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._opened: dict[bytes, _Opened] = {}
        self.handle = _handle(planes)
        block_bytes = sum(4 * each[:, 0].numel() for each in planes)
        self.seconds_per_block = block_bytes / ASSUMED_BYTES_PER_SECOND

    def rehearse(self) -> None:
        """Compiles the kernel of copies: copies block 0, which no request has, onto itself."""
        with torch.cuda.stream(self._stream):
            block = torch.zeros(1, dtype=torch.int32, device=self._device)
            for planes in self._planes:
                pull_blocks(planes.data_ptr(), planes.shape[1], planes, block, block)

    def copy(self, handle: bytes, sources: Int32Array, targets: Int32Array) -> CudaDirectCopy:
        if (opened := self._opened.get(handle)) is None:
            opened = self._opened[handle] = _opened(handle, len(self._planes))
        num_blocks = min(each for _, each in opened.caches)
        if sources.max(initial=0) >= num_blocks:
            raise OSError(f"block {sources.max()} is not in a KV cache of {num_blocks} blocks")
        self._protect(self._stream, targets)
        with torch.cuda.stream(self._stream):
            pairs = upload(np.stack([sources, targets]), self._device)
            for planes, (address, size) in zip(self._planes, opened.caches, strict=True):
                pull_blocks(address, size, planes, *pairs)
            return CudaDirectCopy(self._stream.record_event())

    def close(self, handle: bytes) -> None:
        """See `DirectCopies`. While the memory of an engine that died is mapped here, its GPU
        cannot use it again."""
        if (opened := self._opened.pop(handle, None)) is not None:
            for base in opened.bases:
                close_address(base)


def _handle(planes: Sequence[torch.Tensor]) -> bytes:
    """Empty where the driver shares no memory."""
    try:
        pieces = [handle_of(each.data_ptr()) for each in planes]
    except PeerError:
        return b""
    caches = [
        [b64encode(handle).decode(), offset, each.shape[1]]
        for (handle, offset), each in zip(pieces, planes, strict=True)
    ]
    return json.dumps({"host": host_id(), "caches": caches}).encode()


def _opened(handle: bytes, num_caches: int) -> _Opened:
    """Raises `OSError`."""
    described = json.loads(handle) if handle else {}
    if described.get("host") != host_id() or len(described["caches"]) != num_caches:
        raise OSError("the engine is on another host")
    opened = _Opened([], [])
    try:
        for encoded, offset, num_blocks in described["caches"]:
            base = open_address(b64decode(encoded))
            opened.bases.append(base)
            opened.caches.append((base + offset, num_blocks))
    except PeerError:
        for base in opened.bases:
            close_address(base)
        raise
    return opened
