"""Adapters of an engine by name: checked first, then published, and dropped when the requests that
have them have ended."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..runtime.errors import BadRequest, NotFound
from ..runtime.member import ServedAdapter
from ..runtime.settings import SettingError
from .messages import AdapterDropped, AdapterRead, Command, DropAdapter, ReadAdapter


@dataclass(slots=True)
class _Held:
    """An adapter in the core's memory."""

    rank: int
    num_bytes: int
    is_leaving: bool = False


@dataclass(slots=True)
class EngineAdapters:
    """Loads are checked by `check` before `publish` gives them a name."""

    send: Callable[[Command], None]
    on_change: Callable[[], None] = lambda: None
    """Called when the adapters that are shown have changed."""
    _held: dict[bytes, _Held] = field(default_factory=dict)
    _published: dict[str, ServedAdapter] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _reading: dict[int, asyncio.Future[AdapterRead]] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[ServedAdapter, ...]:
        """Published adapters, and others that requests may have by their hash."""
        named = {each.digest for each in self._published.values()}
        others = (
            ServedAdapter(name="", digest=digest, rank=held.rank)
            for digest, held in self._held.items()
            if digest not in named
        )
        return (*self._published.values(), *others)

    def has(self, digest: bytes) -> bool:
        """Whether the engine has the adapter; true without an adapter."""
        return not digest or digest in self._held

    async def check(self, folder: str, within: str = "", digest: bytes = b"") -> AdapterRead:
        """Has the core read an adapter, which requests may then have by its hash. `within`: a
        folder that the adapter's has to lie in; empty: any. `digest`: hash of the content that is
        meant, of which an adapter that is here is not read again; empty: any. Raises
        `BadRequest`."""
        held = self._held.get(digest)
        if held is not None and not held.is_leaving:
            return AdapterRead(0, digest, held.rank, held.num_bytes)
        read = await self._read(folder, within)
        if digest and read.digest != digest:
            self.forget(read.digest)
            raise BadRequest(
                "adapter",
                f"the files of the adapter hash to {read.digest.hex()}; allowed: {digest.hex()}, "
                "with which it was loaded",
                code="adapter_changed",
            )
        return read

    async def _read(self, folder: str, within: str) -> AdapterRead:
        number = next(self._numbers)
        reading = asyncio.get_running_loop().create_future()
        self._reading[number] = reading
        self.send(ReadAdapter(number, folder, within))
        read: AdapterRead = await reading
        if read.error:
            raise BadRequest("adapter", read.error, code="adapter_refused")
        self._held[read.digest] = _Held(read.rank, read.num_bytes)
        self.on_change()
        return read

    def publish(self, name: str, digest: bytes) -> None:
        """Serves a checked adapter under a name; the one before it leaves. Raises `NotFound`."""
        if digest not in self._held:
            raise NotFound("adapter", digest.hex())
        before = self._published.get(name)
        held = self._held[digest]
        held.is_leaving = False
        self._published[name] = ServedAdapter(
            name=name, digest=digest, rank=held.rank, published_at=time.time()
        )
        if before is not None:
            self._leave(before.digest)
        self.on_change()

    def unload(self, name: str) -> None:
        """Takes a name from its adapter, which is dropped when its requests have ended. Raises
        `NotFound`."""
        if (before := self._published.pop(name, None)) is None:
            raise NotFound("adapter", name)
        self._leave(before.digest)
        self.on_change()

    def forget(self, digest: bytes) -> None:
        """Drops a checked adapter when its requests have ended, unless it has a name."""
        if digest in self._held:
            self._leave(digest)

    def on_report(self, report: AdapterRead | AdapterDropped) -> None:
        if isinstance(report, AdapterRead):
            self._reading.pop(report.number).set_result(report)
        elif self._held[report.digest].is_leaving:
            del self._held[report.digest]
            self.on_change()

    def _leave(self, digest: bytes) -> None:
        if all(each.digest != digest for each in self._published.values()):
            self._held[digest].is_leaving = True
            self.send(DropAdapter(digest))


async def load_modules(adapters: EngineAdapters, modules: Sequence[str]) -> None:
    """Serves adapters, each NAME=FOLDER. Raises `SettingError` naming the one that cannot be."""
    for module in modules:
        name, _, folder = module.partition("=")
        try:
            read = await adapters.check(folder)
        except BadRequest as error:
            raise SettingError("lora_modules", module, f"adapters of the model ({error})") from None
        adapters.publish(name, read.digest)
