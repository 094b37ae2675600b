"""Prefetches that gateways have asked for: each lasts as long as its call, and the core knows it by
a number.

Knows nothing about blocks or when they are pulled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from headwater.engine_core.kv.prefetch import NewPrefetch
from headwater.engine_core.kv.prefix_hash import HASH_LEN
from headwater.engine_core.request import Holder
from headwater.proto import engine_pb2 as pb

from ...runtime.errors import BadRequest
from ..core.messages import Command, EndPrefetch, Prefetch

MAX_SECONDS = 600.0
"""Longest life of a prefetch, whatever its gateway says."""
MAX_BLOCKS = 1 << 16


class OpenPrefetches:
    def __init__(self, send: Callable[[Command], None], *, pulls: bool) -> None:
        """`send` reaches the core; `pulls`: whether the core pulls blocks from other engines at
        all."""
        self._send = send
        self._pulls = pulls
        self._numbers = itertools.count(1)
        self._is_over = asyncio.Event()

    async def run(self, request: pb.PrefetchRequest, is_left: asyncio.Future[None]) -> None:
        """Returns when its caller has left, when its time is over, or with `end`. Raises
        `BadRequest`."""
        new = prefetch_of(request, next(self._numbers))
        if not self._pulls or self._is_over.is_set():
            return
        over: asyncio.Future[Any] = asyncio.ensure_future(self._is_over.wait())
        self._send(Prefetch(new))
        try:
            await asyncio.wait(
                [over, is_left], timeout=new.seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            over.cancel()
            self._send(EndPrefetch(new.number))

    def end(self) -> None:
        """Ends all prefetches, and refuses later ones, since the engine shuts down."""
        self._is_over.set()


def prefetch_of(request: pb.PrefetchRequest, number: int) -> NewPrefetch:
    """Raises `BadRequest`."""
    hashes = request.block_hashes
    namespace = request.cache_namespace
    if len(hashes) % HASH_LEN or len(hashes) > MAX_BLOCKS * HASH_LEN:
        raise BadRequest.of(
            "block_hashes", f"{len(hashes)} bytes", f"{HASH_LEN} bytes each, {MAX_BLOCKS} at most"
        )
    BadRequest.unless(
        len(namespace) == HASH_LEN,
        "cache_namespace",
        f"{len(namespace)} bytes",
        f"{HASH_LEN} bytes",
    )
    holder = request.holder
    return NewPrefetch(
        number=number,
        hashes=[hashes[start : start + HASH_LEN] for start in range(0, len(hashes), HASH_LEN)],
        namespace=namespace,
        tenant=request.tenant,
        holder=Holder(address=holder.address, epoch=holder.epoch, num_tokens=holder.num_tokens),
        chunk_blocks=request.chunk_blocks,
        seconds=min(request.limit_ms / 1000, MAX_SECONDS),
    )
