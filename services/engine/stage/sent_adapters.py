"""Adapters that are sent to an engine: their files are written to a temporary folder, checked
there, and deleted."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from headwater.engine_core.weights.adapters.content import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    TENSORS_NAME,
)
from headwater.proto.engine_pb2 import AdapterPart

from ...runtime.errors import BadRequest
from ..core.messages import AdapterRead
from .adapters import EngineAdapters

MAX_TENSOR_BYTES = 16 << 30
"""More than the largest adapter of any model that is served."""


async def check_sent(adapters: EngineAdapters, parts: AsyncIterator[AdapterPart]) -> AdapterRead:
    """Takes the files of an adapter, and checks it as `EngineAdapters.check` does. Raises
    `BadRequest`, also for more or fewer bytes than the first part announces."""
    with tempfile.TemporaryDirectory(prefix="headwater-adapter-") as folder:
        digest = await _write(Path(folder), parts)
        return await adapters.check(folder, digest=digest)


async def _write(folder: Path, parts: AsyncIterator[AdapterPart]) -> bytes:
    """Writes the two files. Returns the hash that the first part names."""
    first = await anext(parts, AdapterPart())
    _check_size("num_config_bytes", first.num_config_bytes, MAX_CONFIG_BYTES)
    _check_size("num_tensor_bytes", first.num_tensor_bytes, MAX_TENSOR_BYTES)
    num_left = first.num_config_bytes
    with (folder / CONFIG_NAME).open("wb") as config, (folder / TENSORS_NAME).open("wb") as tensors:
        num_bytes = 0
        async for part in parts:
            num_bytes += len(part.data)
            if num_bytes > first.num_config_bytes + first.num_tensor_bytes:
                break
            config.write(part.data[:num_left])
            await asyncio.to_thread(tensors.write, part.data[num_left:])
            num_left -= min(num_left, len(part.data))
    announced = first.num_config_bytes + first.num_tensor_bytes
    BadRequest.unless(
        num_bytes == announced, "data", f"{num_bytes} bytes", f"the {announced} that were announced"
    )
    return first.digest


def _check_size(name: str, num_bytes: int, most: int) -> None:
    BadRequest.unless(0 < num_bytes <= most, name, num_bytes, f"1…{most}")
