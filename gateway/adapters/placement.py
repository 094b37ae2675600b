"""Keeps engines in step with the catalogue of adapters: one that joins reads those of its model, a
request's adapter is read where it is missing, and what no name stands for is dropped.

An adapter goes to an engine from a folder of the engine's host, or from the adapter store.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import structlog

from headwater.proto.engine_pb2 import CheckAdapterReply
from headwater.services.runtime import errors
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Change, ChangeKind, Members
from headwater.services.runtime.tasks import owned_task, set_within

from . import engine_calls
from .catalogue import AdapterCatalogue
from .contents import AdapterContents
from .records import AdapterRecord

LOOK_SECONDS = 2.0
DROP_SECONDS = 3.0
"""Seconds for which an engine keeps content after its name was removed: requests may be on their
way."""
UNKNOWN_SECONDS = 60.0
"""Seconds for which it keeps content that has no name at this gateway: another gateway may be about
to add one."""
RETRY_SECONDS = 60.0
"""Time until an engine that refused an adapter is given it again unasked."""
Incarnation = tuple[str, int]


class AdapterPlacement:
    """Use within `running`."""

    def __init__(
        self, members: Members, catalogue: AdapterCatalogue, contents: AdapterContents
    ) -> None:
        self.is_in_use: Callable[[bytes], bool] = lambda _: False
        """Whether a request of this gateway has the content with this hash."""
        self._members = members
        self._catalogue = catalogue
        self.contents = contents
        self._loads: dict[tuple[Incarnation, bytes], asyncio.Task[CheckAdapterReply]] = {}
        self._refused: dict[tuple[Incarnation, bytes], float] = {}
        """Time at which an engine refused an adapter."""
        self._unnamed: dict[tuple[Incarnation, bytes], float] = {}
        """Time since which an engine has content that no name refers to."""
        self._num_checking = 0
        """Adapters of this gateway that are about to get their names."""
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AdapterPlacement]:
        self._catalogue.on_change(self._changed.set)
        self._members.on_change(self._on_member)
        try:
            async with owned_task(self._follow()):
                yield self
        finally:
            self._members.forget_listener(self._on_member)

    async def ensure(self, model: str, digest: bytes, failed: Collection[Incarnation]) -> None:
        """Returns when an engine of the model, other than those that failed, has the adapter; at
        once where there is no engine. Raises `Unavailable` where none can have it."""
        if not digest:
            return
        engines = self._left(model, failed)
        if not engines or any(has(each, digest) for each in engines):
            return
        record = self._catalogue.by_digest(model, digest)
        if record is None:
            raise errors.Unavailable(
                "the adapter was unloaded before the request began", code="adapter_unavailable"
            )
        error: errors.HeadwaterError | None = None
        for load in asyncio.as_completed([self._load(each, record) for each in engines]):
            try:
                await load
            except errors.HeadwaterError as failure:
                error = failure
            else:
                return
        assert error is not None
        raise errors.Unavailable(
            f"no engine can load the adapter: {error.message}", code="adapter_unavailable"
        )

    def is_displaced(self, model: str, digest: bytes, failed: Collection[Incarnation]) -> bool:
        """Whether the model has engines, other than failed ones, none of which has the adapter any
        more: it was evicted."""
        engines = self._left(model, failed)
        return bool(digest and engines) and not any(has(each, digest) for each in engines)

    def _left(self, model: str, failed: Collection[Incarnation]) -> list[Member]:
        """The engines of the model other than those that failed."""
        return [
            each for each in self.engines_of(model) if (each.replica_id, each.epoch) not in failed
        ]

    def engines_of(self, model: str) -> list[Member]:
        """The engines that serve a model and take requests."""
        return [
            each
            for each in self._members.of(Kind.ENGINE)
            if each.model is not None and each.model.name == model and not each.draining
        ]

    async def check(
        self, engines: Sequence[Member], draft: AdapterRecord, within: str = ""
    ) -> CheckAdapterReply:
        """Has every engine read an adapter, whose hash is not known yet. Raises the first refusal,
        and `BadRequest` where engines do not read the same. Engines drop what gets no name."""
        self._num_checking += 1
        try:
            replies = await engine_calls.of_each(
                engines, lambda each: self._read(each, draft, within)
            )
            checked = [each for each in replies if not isinstance(each, errors.HeadwaterError)]
            for failure in replies:
                if isinstance(failure, errors.HeadwaterError):
                    await self._drop_unnamed(engines, {each.digest for each in checked})
                    raise failure
            if len(digests := {each.digest for each in checked}) > 1:
                await self._drop_unnamed(engines, digests)
                hosts = "the same files on the hosts of all engines"
                raise errors.BadRequest.of("folder", draft.folder, hosts)
            return checked[0]
        finally:
            self._num_checking -= 1

    async def _read(
        self, engine: Member, record: AdapterRecord, within: str = ""
    ) -> CheckAdapterReply:
        """Makes an engine read an adapter, and notes that it has it. Raises the engine's error."""
        digest = record.digest
        if record.folder:
            reply = await engine_calls.check_folder(
                engine, record.folder, within=within, digest=digest
            )
        else:
            parts = self.contents.parts(record.content, digest)
            reply = await engine_calls.send_content(engine, parts)
        # The next heartbeat may be a second away.
        with contextlib.suppress(errors.HeadwaterError, ValueError):
            self._members.on_member(await engine_calls.described(engine), from_bus=False)
        return reply

    async def _load(self, engine: Member, record: AdapterRecord) -> CheckAdapterReply:
        """Has an engine read an adapter of the catalogue; requests for the same one wait for one
        reading. Raises what it is refused with."""
        key = incarnation_of(engine), record.digest
        task = self._loads.get(key)
        if task is None:
            task = self._loads[key] = asyncio.ensure_future(self._read(engine, record))
            task.add_done_callback(lambda _: self._loads.pop(key, None))
        try:
            reply = await asyncio.shield(task)
        except errors.HeadwaterError as error:
            if key not in self._refused:
                structlog.get_logger().warning(
                    "an engine has not loaded an adapter",
                    replica=engine.replica_id,
                    name=record.name,
                    error=str(error),
                )
            self._refused[key] = time.monotonic()
            raise
        self._refused.pop(key, None)
        return reply

    async def _drop_unnamed(self, engines: Sequence[Member], digests: Collection[bytes]) -> None:
        for digest in digests:
            if not self._catalogue.has_content(digest):
                await self._drop(engines, digest)

    async def _drop(self, engines: Sequence[Member], digest: bytes) -> None:
        """Has engines drop adapter content when no request uses it any more. An engine that does
        not answer is asked again."""
        await engine_calls.of_each(engines, lambda each: engine_calls.forget(each, digest))

    async def _follow(self) -> None:
        while True:
            await set_within(self._changed, LOOK_SECONDS)
            self._changed.clear()
            engines = [each for each in self._members.of(Kind.ENGINE) if each.model is not None]
            await asyncio.gather(*map(self._fill, engines))
            await self._sweep(engines)

    async def _fill(self, engine: Member) -> None:
        """Makes an engine read the missing adapters of its model, one after another."""
        now = time.monotonic()
        assert engine.model is not None
        for record in self._catalogue.records:
            refused_at = self._refused.get((incarnation_of(engine), record.digest), -RETRY_SECONDS)
            if (
                record.base != engine.model.name
                or engine.draining
                or knows(engine, record.digest)
                or now - refused_at < RETRY_SECONDS
            ):
                continue
            with contextlib.suppress(errors.HeadwaterError):
                await self._load(engine, record)

    async def _sweep(self, engines: Sequence[Member]) -> None:
        """Has engines drop content that no name has stood for during a while."""
        now = time.monotonic()
        present = set()
        for engine in engines:
            for digest in self._unnamed_of(engine):
                key = incarnation_of(engine), digest
                present.add(key)
                since = self._unnamed.setdefault(key, now)
                was_named = self._catalogue.was_dropped(digest)
                if now - since >= (DROP_SECONDS if was_named else UNKNOWN_SECONDS):
                    await self._drop([engine], digest)
        self._unnamed = {key: since for key, since in self._unnamed.items() if key in present}
        here = {incarnation_of(each) for each in engines}
        self._refused = {key: at for key, at in self._refused.items() if key[0] in here}

    def _unnamed_of(self, engine: Member) -> list[bytes]:
        """Content of an engine that is to be dropped in a while."""
        if self._num_checking:
            return []
        named = {each.digest for each in engine.adapters if each.name}
        return [
            each.digest
            for each in engine.adapters
            if each.digest not in named
            and not self._catalogue.has_content(each.digest)
            # Without NATS the names of another gateway are not known.
            and (self._catalogue.is_durable or self._catalogue.was_dropped(each.digest))
            and not self.is_in_use(each.digest)
        ]

    def _on_member(self, change: Change) -> None:
        if change.kind is ChangeKind.JOINED and change.member.kind is Kind.ENGINE:
            self._changed.set()


def incarnation_of(engine: Member) -> Incarnation:
    return engine.replica_id, engine.epoch


def has(engine: Member, digest: bytes) -> bool:
    """Whether requests of an engine may have the content now."""
    return any(each.digest == digest and not each.is_evicted for each in engine.adapters)


def knows(engine: Member, digest: bytes) -> bool:
    """Whether requests of an engine may have the content, or it has left the engine's host memory
    and is read again for the next request."""
    return any(each.digest == digest for each in engine.adapters)
