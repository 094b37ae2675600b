"""Files of tenants: metadata in a bucket, contents in an object store. Knows nothing about batches
or HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Any

import msgspec
import nats.js.errors

from headwater.services.runtime.errors import NotFound
from headwater.services.runtime.refusals import Refusals

from ...buckets import drop_object
from ...hashed_file import HashedFile
from ..durable import CONTENTS, KEPT_SECONDS, Durable
from ..tenant_records import TenantRecords
from .records import File, new_id, now

IN_MEMORY_BYTES = 1 << 20
"""Number of bytes of a file in transit that are kept in memory; more goes to disk."""
READ_SECONDS = 300.0


class KeptFile(File, kw_only=True):
    """Record of a file. It is signed; the content in the object store is not."""

    sha256: str = ""
    """Digest of the content; empty in records of an earlier version."""


_kept = msgspec.json.Decoder(KeptFile)
_refusals = Refusals("record")


class Files:
    """Files by tenant and id. Every method raises `NotFound` for a file that does not exist or is
    another tenant's."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._records: TenantRecords[File] = TenantRecords(
            durable, "files", "file", msgspec.json.Decoder(File).decode, msgspec.json.encode
        )

    async def add(
        self, tenant: str, filename: str, purpose: str, content: IO[bytes], num_bytes: int
    ) -> File:
        rooms = await self._durable.rooms()
        file = File(
            id=new_id("file-"),
            bytes=num_bytes,
            filename=filename,
            purpose=purpose,
            created_at=now(),
            expires_at=now() + int(KEPT_SECONDS),
        )
        content.seek(0)
        hashed = HashedFile(content)
        reader: Any = hashed
        # The content is written first, so that a listed file can be read.
        await rooms.contents.put(file.id, reader)
        kept = KeptFile(**msgspec.structs.asdict(file), sha256=hashed.digest)
        await self._records.create(tenant, file.id, kept)
        return file

    async def get(self, tenant: str, file_id: str) -> File:
        return await self._records.get(tenant, file_id)

    async def all(self, tenant: str) -> list[File]:
        """Files of a tenant, the youngest first."""
        return sorted(
            await self._records.all(tenant),
            key=lambda file: (file.created_at, file.id),
            reverse=True,
        )

    @contextlib.asynccontextmanager
    async def opened(self, tenant: str, file_id: str) -> AsyncIterator[IO[bytes]]:
        """Copies the content to this machine inside the `with` block. Content that does not match
        the record counts as missing."""
        rooms = await self._durable.rooms()
        kept = _kept.decode((await self._records.value(tenant, file_id))[0])
        with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as copy:
            content: Any = copy
            into: Any = (hashed := HashedFile(content))
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await rooms.contents.get(file_id, writeinto=into)
            except nats.js.errors.NotFoundError:
                raise NotFound("file", file_id) from None
            if kept.sha256 not in ("", hashed.digest):
                _refusals.add("forged", key=file_id)
                raise NotFound("file", file_id)
            copy.seek(0)
            yield content

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file, also while storage is full."""
        await self._records.drop(tenant, file_id)
        await drop_object((await self._durable.rooms()).js, CONTENTS, file_id)

    async def drop_all(self, tenant: str) -> None:
        """Drops the files of a tenant that was removed."""
        for file in await self.all(tenant):
            with contextlib.suppress(NotFound):
                await self.delete(tenant, file.id)
