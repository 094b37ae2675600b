"""Copies KV blocks from the memory of another engine on a GPU of this host, beside the steps: one
kernel reads them over the links between the GPUs and writes them into their blocks."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headwater.kernels.blocks.copy_blocks import pull_blocks
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
    """Memory of another engine, mapped in this process."""

    base: int
    """Address of the piece that was opened."""
    address: int
    """Address of the first block."""
    num_blocks: int


class CudaDirectCopies:
    """See `DirectCopies`."""

    def __init__(self, words: torch.Tensor, protect: Protect) -> None:
        """words int32 [num_blocks, words of a block]. `protect` makes a stream wait for all
        that still reads blocks which it will write."""
        self._words = words
        self._protect = protect
        self._device = words.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch ships it so
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._opened: dict[bytes, _Opened] = {}
        self.handle = _handle(words)
        self.seconds_per_block = words[0].nbytes / ASSUMED_BYTES_PER_SECOND

    def rehearse(self) -> None:
        """Compiles the kernel of copies: copies block 0, which no request has, onto itself."""
        with torch.cuda.stream(self._stream):
            block = torch.zeros(1, dtype=torch.int32, device=self._device)
            pull_blocks(self._words.data_ptr(), self._words, block, block)

    def copy(self, handle: bytes, sources: Int32Array, targets: Int32Array) -> CudaDirectCopy:
        if (opened := self._opened.get(handle)) is None:
            opened = self._opened[handle] = _opened(handle)
        if sources.max(initial=0) >= opened.num_blocks:
            raise OSError(
                f"block {sources.max()} is not in a KV cache of {opened.num_blocks} blocks"
            )
        self._protect(self._stream, targets)
        with torch.cuda.stream(self._stream):
            pairs = upload(np.stack([sources, targets]), self._device)
            pull_blocks(opened.address, self._words, *pairs)
            return CudaDirectCopy(self._stream.record_event())

    def close(self, handle: bytes) -> None:
        """See `DirectCopies`. As long as the memory of a dead engine is mapped here, its GPU cannot
        reuse it."""
        if (opened := self._opened.pop(handle, None)) is not None:
            close_address(opened.base)


def _handle(words: torch.Tensor) -> bytes:
    """Empty where the driver shares no memory."""
    try:
        piece, offset = handle_of(words.data_ptr())
    except PeerError:
        return b""
    described = {
        "host": host_id(),
        "piece": b64encode(piece).decode(),
        "offset": offset,
        "num_blocks": len(words),
    }
    return json.dumps(described).encode()


def _opened(handle: bytes) -> _Opened:
    """Raises `OSError`."""
    described = json.loads(handle) if handle else {}
    if described.get("host") != host_id():
        raise OSError("the engine is on another host")
    base = open_address(b64decode(described["piece"]))
    return _Opened(base, base + described["offset"], described["num_blocks"])
