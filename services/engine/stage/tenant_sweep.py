"""Deletes blocks of removed tenants from the disk folder: it asks a gateway which of those that
have any are gone.

At the start, whenever tenants change, and once a minute: a tenant that was removed while no engine
ran is noticed, and a block that was on its way to the disk then as well. Knows nothing about
engines that have the folder's blocks in use.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import msgspec
import structlog

from headwater.engine_core.kv.tenant_files import delete_tenants, tenants_below

from ...runtime import subjects
from ...runtime.bus import Bus, Subscription
from ...runtime.tasks import owned_task, set_within

LOOK_SECONDS = 60.0
SETTLE_SECONDS = 0.5
"""Seconds after a change within which gateways have read the tenants again."""
ASK_SECONDS = 2.0
MAX_NAMES = 4096
"""Number of tenants in one question, which fits into a message of the bus however long their names
are."""
_names = msgspec.json.Decoder(list[str])


class TenantSweep:
    """Use within `running`."""

    def __init__(self, bus: Bus, root: Path) -> None:
        self._bus = bus
        self._root = root
        self._changed = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, bus: Bus, root: Path | None) -> AsyncIterator[None]:
        """Sweeps inside the `with` block; without a folder there is nothing to sweep."""
        if root is None:
            yield
            return
        sweep = cls(bus, root)
        bus.on_connected(sweep._changed.set)
        async with (
            bus.subscribe(subjects.TENANTS_CHANGED) as changes,
            owned_task(sweep._follow(changes)),
            owned_task(sweep._look()),
        ):
            yield

    async def look(self) -> int:
        """Returns the number of namespaces that were deleted."""
        try:
            if not (gone := await self._gone(await asyncio.to_thread(tenants_below, self._root))):
                return 0
            num_deleted = await asyncio.to_thread(delete_tenants, self._root, gone)
        except (OSError, msgspec.MsgspecError) as failure:
            structlog.get_logger().warning(
                "blocks of removed tenants were not deleted", error=repr(failure)
            )
            return 0
        structlog.get_logger().info(
            "blocks of removed tenants deleted", tenants=len(gone), namespaces=num_deleted
        )
        return num_deleted

    async def _gone(self, known: Collection[str]) -> set[str]:
        """Returns the tenants that a gateway knows to be removed."""
        gone = set[str]()
        names = sorted(known)
        for first in range(0, len(names), MAX_NAMES):
            asked = names[first : first + MAX_NAMES]
            question = msgspec.json.encode(asked)
            answer = await self._bus.request(subjects.GONE_TENANTS, question, seconds=ASK_SECONDS)
            gone.update(
                set(_names.decode(answer)).intersection(asked) if answer is not None else ()
            )
        return gone

    async def _look(self) -> None:
        while True:
            await self.look()
            await set_within(self._changed, LOOK_SECONDS)
            self._changed.clear()
            await asyncio.sleep(SETTLE_SECONDS)

    async def _follow(self, changes: Subscription) -> None:
        async for _ in changes:
            self._changed.set()
