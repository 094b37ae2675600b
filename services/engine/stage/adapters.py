"""Adapters of an engine by name: checked, then published, and dropped when their last request has
ended. Their host memory is bounded: least recently used ones are evicted, stay known, and are read
again for the next request."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...runtime.errors import BadRequest, NotFound, Unavailable
from ...runtime.member import ServedAdapter
from ...runtime.settings import SettingError
from ..core.messages import AdapterDropped, AdapterRead, Command, DropAdapter, ReadAdapter

EVICT_SECONDS = 2.0
"""Seconds from the report of an eviction to the eviction: gateways learn of it by heartbeats, each
second, and requests may be on their way. An adapter that is asked for meanwhile stays."""
ROOM_SECONDS = 30.0
"""Longest wait for room in host memory: adapters of running requests do not leave it."""


@dataclass(slots=True)
class _Held:
    """An adapter that requests may have, or may have again once it is read again."""

    rank: int
    num_bytes: int
    """Bytes that it takes of host memory; 0: it was evicted."""
    is_leaving: bool = False
    eviction: asyncio.TimerHandle | None = None
    """Timer of its eviction; None: none is due."""
    is_gone: bool = False
    """Whether it was evicted: requests cannot have it before it is read again."""


@dataclass(slots=True)
class EngineAdapters:
    """Loads are checked by `check` before `publish` gives them a name."""

    send: Callable[[Command], None]
    on_change: Callable[[], None] = lambda: None
    """Called when the adapters that are shown have changed."""
    max_bytes: int = sys.maxsize
    """Bytes of host memory for adapters, those aside that are being read."""
    num_evicted: int = 0
    """Number of adapters evicted from host memory so far."""
    _held: dict[bytes, _Held] = field(default_factory=dict)
    """Keyed by hash, the most recently used adapter last."""
    _published: dict[str, ServedAdapter] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _reading: dict[int, asyncio.Future[AdapterRead]] = field(default_factory=dict)
    _dropped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that adapters take."""
        return sum(each.num_bytes for each in self._held.values())

    @property
    def shown(self) -> tuple[ServedAdapter, ...]:
        """Published adapters, and others that requests may have by their hash, or may have again
        once they are read again."""
        named = {each.digest for each in self._published.values()}
        others = (
            ServedAdapter(
                name="", digest=digest, rank=held.rank, is_evicted=held.eviction is not None
            )
            for digest, held in self._held.items()
            if digest not in named
        )
        return (*self._published.values(), *others)

    def has(self, digest: bytes) -> bool:
        """Whether requests may have the adapter; all may have none."""
        return not digest or (digest in self._held and not self._held[digest].is_gone)

    def note_use(self, digest: bytes) -> None:
        """Notes that a request has the adapter: others leave host memory before it."""
        held = self._held.pop(digest, None)
        if held is None:
            return
        self._held[digest] = held
        if held.eviction is not None and not held.is_gone:
            held.eviction.cancel()
            held.eviction = None
            self._evict()
            self.on_change()

    async def check(self, folder: str, within: str = "", digest: bytes = b"") -> AdapterRead:
        """Has the core read an adapter, which requests may then have by its hash. `within`: a
        folder that the adapter's has to lie in; empty: any. `digest`: hash of the content that is
        meant, of which an adapter that is here is not read again; empty: any. Raises
        `BadRequest`, and `Unavailable` while running requests keep other adapters in all of the
        host memory."""
        held = self._held.get(digest)
        if held is not None and not (held.is_leaving or held.is_gone):
            self.note_use(digest)
            return AdapterRead(0, digest, held.rank, held.num_bytes)
        await self._await_room()
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
        self._held.pop(read.digest, None)
        self._held[read.digest] = _Held(read.rank, read.num_bytes)
        self._check_size(read)
        self._evict()
        self.on_change()
        return read

    def _check_size(self, read: AdapterRead) -> None:
        """Raises `BadRequest` for an adapter that does not fit beside those that never leave."""
        named = {each.digest for each in self._published.values()} - {read.digest}
        others = sum(self._held[digest].num_bytes for digest in named)
        if read.num_bytes + others > self.max_bytes:
            self._leave(read.digest)
            which = f", of which adapters with a name of this engine take {others}" if named else ""
            raise BadRequest(
                "adapter",
                f"the adapter takes {read.num_bytes} bytes of host memory; allowed: "
                f"adapter_host_memory, {self.max_bytes} bytes{which}",
                code="adapter_refused",
            )

    async def _await_room(self) -> None:
        """Returns when what adapters take of host memory is within its bound. Raises
        `Unavailable`."""
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while self.num_bytes > self.max_bytes:
                    self._dropped.clear()
                    await self._dropped.wait()
        except TimeoutError:
            raise Unavailable(
                f"adapters of running requests take {self.num_bytes} bytes of host memory; "
                f"allowed: adapter_host_memory, {self.max_bytes} bytes",
                code="adapter_unavailable",
            ) from None

    def _evict(self) -> None:
        """Begins to evict the least recently used adapters until the others fit the bound; the last
        one and those that have a name here stay."""
        named = {each.digest for each in self._published.values()}
        staying = {
            digest: each
            for digest, each in self._held.items()
            if not each.is_leaving and each.eviction is None
        }
        num_bytes = sum(each.num_bytes for each in staying.values())
        for digest, held in list(staying.items())[:-1]:
            if num_bytes <= self.max_bytes:
                return
            if digest not in named:
                loop = asyncio.get_running_loop()
                held.eviction = loop.call_later(EVICT_SECONDS, self._end_eviction, digest)
                num_bytes -= held.num_bytes

    def _end_eviction(self, digest: bytes) -> None:
        self._held[digest].is_gone = True
        self.num_evicted += 1
        self.send(DropAdapter(digest))

    def publish(self, name: str, digest: bytes) -> None:
        """Serves a checked adapter under a name; the one before it leaves. Raises `NotFound`."""
        if digest not in self._held:
            raise NotFound("adapter", digest.hex())
        before = self._published.get(name)
        held = self._held[digest]
        held.is_leaving = False
        assert held.eviction is None
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
            return
        held = self._held[report.digest]
        if held.is_leaving:
            del self._held[report.digest]
            self.on_change()
        elif held.is_gone:
            held.num_bytes = 0
        self._dropped.set()

    def _leave(self, digest: bytes) -> None:
        if all(each.digest != digest for each in self._published.values()):
            held = self._held[digest]
            if held.eviction is not None:
                held.eviction.cancel()
            held.is_leaving = True
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
