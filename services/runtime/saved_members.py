"""The members of the cluster as the bus last reported them, in a file of this machine, for a start
while NATS is away.

Knows names, addresses and models; the reader of the list finds out which members still live.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import structlog
from google.protobuf import json_format

from headwater.proto import events_pb2

from .bus import Bus
from .member import Member
from .membership import Change, ChangeKind, Members
from .owner_file import write_owner_file
from .tasks import owned_task

SETTLE_SECONDS = 1.0
"""Seconds between two writings: many changes come at once while a cluster starts."""


class SavedMembers:
    """File of members. Without a `path` it keeps nothing."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._kept = b""

    def load(self) -> list[Member]:
        """Members of the file; empty where there is no list that can be read."""
        if self._path is None or not self._path.exists():
            return []
        try:
            listed = json_format.Parse(self._path.read_bytes(), events_pb2.MemberList())
            return [Member.from_pb(each) for each in listed.members]
        except (OSError, json_format.ParseError, ValueError) as failure:
            structlog.get_logger().warning("the file of members cannot be read", error=str(failure))
            return []

    @contextlib.asynccontextmanager
    async def keeping(self, bus: Bus, members: Members) -> AsyncIterator[None]:
        """Keeps the list up to date inside the `with` block, as far as the bus reports members."""
        if self._path is None:
            yield
            return
        changed = asyncio.Event()

        def note(change: Change) -> None:
            if change.kind is not ChangeKind.UPDATED:
                changed.set()

        members.on_change(note)
        try:
            async with owned_task(self._keep(bus, members, changed)):
                yield
        finally:
            members.forget_listener(note)

    async def _keep(self, bus: Bus, members: Members, changed: asyncio.Event) -> None:
        while True:
            await changed.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            # Without the bus unreachable members leave the table, and they may be the only ones at
            # the next start.
            if bus.connected and (everyone := members.everyone()):
                changed.clear()
                await self._save(everyone)

    async def _save(self, everyone: list[Member]) -> None:
        """Writes the file. Errors are logged and not raised."""
        assert self._path is not None
        plain = [dataclasses.replace(each, load=None).to_pb() for each in everyone]
        content = json_format.MessageToJson(events_pb2.MemberList(members=plain)).encode()
        if content == self._kept:
            return
        try:
            await asyncio.to_thread(write_owner_file, self._path, content)
        except OSError as failure:
            structlog.get_logger().warning(
                "members cannot be kept in their file", error=str(failure)
            )
            return
        self._kept = content
