"""Adapters that tenants bring: uploaded files become content of the adapter store and a name of the
tenant's own, within its limits of count and bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import IO
from weakref import WeakValueDictionary

from headwater.services.runtime import errors

from ..long_work import LongWork
from ..tenancy.tenants import Tenant
from .archive import files_of
from .contents import AdapterContents, AdapterFiles
from .loading import AdapterLoading
from .records import OPERATOR, AdapterRecord

OwnLimits = Callable[[str], tuple[int | None, int | None]]


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Storage limits of adapters by `Tenant.key`: the tenant's own limits, or the defaults of all
    tenants."""

    count: int
    num_bytes: int
    own: OwnLimits

    def of(self, tenant: str) -> tuple[int, int]:
        """Number of adapters, and bytes of their files."""
        count, num_bytes = self.own(tenant)
        return (
            self.count if count is None else count,
            self.num_bytes if num_bytes is None else num_bytes,
        )


class OwnAdapters:
    def __init__(
        self,
        loading: AdapterLoading,
        contents: AdapterContents,
        limits: AdapterLimits,
        long_work: LongWork,
    ) -> None:
        self._loading = loading
        self._catalogue = loading.catalogue
        self._contents = contents
        self._limits = limits
        self._long_work = long_work
        self._adding: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, tenant: Tenant) -> list[AdapterRecord]:
        return self._catalogue.owned_by(tenant.key)

    def check_count(self, tenant: Tenant, name: str) -> None:
        """Raises `PermissionDenied` where tenants bring none, `LimitExceeded` where the tenant has
        as many as it may."""
        most, _ = self._limits.of(tenant.key)
        if not most:
            raise errors.PermissionDenied(
                "the operator lets this tenant bring no adapters: --tenant-adapters is 0"
            )
        others = [each for each in self.of(tenant) if each.name != name]
        if len(others) >= most:
            raise errors.LimitExceeded(
                f"the tenant has {len(others)} adapters; allowed: {most}", retry_after=60.0
            )

    async def add(
        self, tenant: Tenant, name: str, base: str, uploads: Sequence[IO[bytes]], num_bytes: int
    ) -> AdapterRecord:
        """Serves an adapter to its tenant. `uploads`: both files, or an archive of them, of
        `num_bytes` in all. Raises `BadRequest`, `LimitExceeded`, `NotFound`, `Unavailable`."""
        lock = self._adding.setdefault(tenant.key, asyncio.Lock())
        async with lock:
            self.check_count(tenant, name)
            before = self._catalogue.owned(tenant.key, name)
            async with self._unpacked(tenant, name, uploads, num_bytes) as files:
                content = await self._contents.put(files)
            draft = AdapterRecord(
                name=name,
                base=base,
                digest=b"",
                rank=0,
                content=content,
                num_bytes=files.num_bytes,
                owner=tenant.key,
            )
            try:
                record = await self._loading.load(draft)
            except BaseException:
                await self._drop_content(content)
                raise
            if before is not None:
                await self._drop_content(before.content)
            return record

    async def remove(self, owner: str, name: str) -> None:
        """Drops an adapter of a tenant. Raises `NotFound`, `Unavailable`."""
        record = await self._loading.unload(owner, name)
        if record is not None:
            await self._drop_content(record.content)

    async def drop_all(self, owner: str) -> None:
        """Drops the adapters of a tenant that was removed."""
        assert owner != OPERATOR
        for record in self._catalogue.owned_by(owner):
            with contextlib.suppress(errors.NotFound):
                await self.remove(owner, record.name)

    @contextlib.asynccontextmanager
    async def _unpacked(
        self, tenant: Tenant, name: str, uploads: Sequence[IO[bytes]], num_bytes: int
    ) -> AsyncIterator[AdapterFiles]:
        """The files of uploads, inside the `with` block. They are unpacked in the thread that
        tenants share."""
        kept = sum(each.num_bytes for each in self.of(tenant) if each.name != name)
        _, most = self._limits.of(tenant.key)
        with contextlib.ExitStack() as stack:
            unpacking = files_of(uploads, max(0, most - kept))
            files = await self._long_work.by_size(
                tenant.key, num_bytes, stack.enter_context, unpacking
            )
            if kept + files.num_bytes > most:
                raise errors.StorageLimitExceeded("adapter_bytes", kept, files.num_bytes, most)
            yield files

    async def _drop_content(self, content: str) -> None:
        """Deletes content without a name. If that fails now it only takes room."""
        if any(each.content == content for each in self._catalogue.records):
            return
        with contextlib.suppress(errors.Unavailable):
            await self._contents.drop(content)
