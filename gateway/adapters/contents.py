"""The adapter store: files of adapters in an object store of JetStream, where they do not expire.
Content is stored under its hash. Knows nothing about tenants or names."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO, Any

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import ObjectStoreConfig, StorageType
from nats.js.object_store import ObjectStore

from headwater.proto.engine_pb2 import AdapterPart
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import NotFound, Unavailable

from ..buckets import drop_object, or_unavailable
from ..hashed_file import HashedFile

CONTENTS = "headwater_adapter_contents"
PART_BYTES = 128 << 10
IN_MEMORY_BYTES = 1 << 20
"""Bytes of an adapter that are kept in memory while it is sent; larger adapters are written to
disk."""
_LENGTH_BYTES = 8
"""Bytes of the length of the config, with which content begins."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The two files of an adapter."""

    config: bytes
    tensors: IO[bytes]
    num_tensor_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.config) + self.num_tensor_bytes


class AdapterContents:
    """The adapter store. Methods raise `Unavailable` without NATS."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def make(self) -> None:
        """Makes the store, unless it is there."""
        with or_unavailable():
            await self._store()

    async def put(self, files: AdapterFiles) -> str:
        """Stores the files of an adapter. Returns the name of the content."""
        name = await asyncio.to_thread(_name_of, files)
        with or_unavailable():
            reader: Any = _Joined(files)
            await (await self._store()).put(name, reader)
        return name

    async def drop(self, name: str) -> None:
        """Drops content, also while storage is full."""
        with or_unavailable():
            await self._store()
            await drop_object(self._js(), CONTENTS, name)

    async def parts(self, name: str, digest: bytes) -> AsyncIterator[AdapterPart]:
        """Messages that send the files to an engine. Raises `NotFound` for content that is missing
        or has another hash."""
        with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as copy:
            content: Any = copy
            into: Any = (hashed := HashedFile(content))
            with or_unavailable():
                try:
                    await (await self._store()).get(name, writeinto=into)
                except nats.js.errors.NotFoundError:
                    raise NotFound("adapter", name) from None
            if hashed.digest != name:
                raise NotFound("adapter", name)
            num_bytes = copy.tell()
            copy.seek(0)
            num_config_bytes = int.from_bytes(copy.read(_LENGTH_BYTES), "little")
            num_tensor_bytes = num_bytes - _LENGTH_BYTES - num_config_bytes
            yield AdapterPart(
                num_config_bytes=num_config_bytes, num_tensor_bytes=num_tensor_bytes, digest=digest
            )
            while piece := copy.read(PART_BYTES):
                yield AdapterPart(data=piece)

    def _js(self) -> JetStreamContext:
        js = self._bus.jetstream()
        if js is None:
            raise Unavailable(
                "the adapter store needs NATS with JetStream", code="storage_unavailable"
            )
        return js

    async def _store(self) -> ObjectStore:
        js = self._js()
        with contextlib.suppress(nats.js.errors.NotFoundError):
            return await js.object_store(CONTENTS)
        config = ObjectStoreConfig(bucket=CONTENTS, storage=StorageType.FILE)
        return await js.create_object_store(CONTENTS, config)


class _Joined:
    """The two files of an adapter as one stream, after the length of the first."""

    def __init__(self, files: AdapterFiles) -> None:
        self._head = len(files.config).to_bytes(_LENGTH_BYTES, "little") + files.config
        self._tensors = files.tensors
        self._tensors.seek(0)

    def read(self, num_bytes: int) -> bytes:
        piece = self._head[:num_bytes] or self._tensors.read(num_bytes)
        self._head = self._head[num_bytes:]
        return piece

    def readinto(self, buffer: bytearray) -> int:
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def _name_of(files: AdapterFiles) -> str:
    """Hash of the content."""
    joined: Any = _Joined(files)
    hashed = HashedFile(joined)
    buffer = bytearray(PART_BYTES)
    while hashed.readinto(buffer):
        pass
    return hashed.digest
