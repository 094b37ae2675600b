"""Reports removed tenants to engines, which delete their blocks on disk."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.tasks import owned_task

_names = msgspec.json.Decoder(list[str])


class Directory(Protocol):
    def is_gone(self, key: str) -> bool: ...


@contextlib.asynccontextmanager
async def gone_tenants_published(bus: Bus, directory: Directory) -> AsyncIterator[None]:
    """Answers questions inside the `with` block."""
    async with (
        bus.subscribe(subjects.GONE_TENANTS) as questions,
        owned_task(_answer(bus, questions, directory)),
    ):
        yield


async def _answer(bus: Bus, questions: Subscription, directory: Directory) -> None:
    async for message in questions:
        with contextlib.suppress(msgspec.MsgspecError):
            gone = [key for key in _names.decode(message.payload) if directory.is_gone(key)]
            if message.reply:
                await bus.publish(message.reply, msgspec.json.encode(gone))
