"""Compiles the grammars of requests in threads of their own: others do not wait for them.

Copies of a compiled grammar share what was found out about its tokens, and a lock on it: those of
one compilation are followed one after another. A grammar that many follow at once is therefore
compiled again, while the first ones go on.

Tenants share the threads fairly, and the room for compiled grammars. A grammar is kept within a
cache namespace: no tenant learns from a time whether others use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLMatcher

from headwater.engine_core.system.usable_cores import usable_cores

from ...grammars.asker import Asker
from ...grammars.grammars import GrammarError, Grammars, grammars_of
from ...models.manifest import ModelFolderError
from ...runtime.errors import LimitExceeded, Unavailable
from ...runtime.fair_queue import QueueLimits
from ...runtime.fair_threads import STAGE_BUSY, FairThreads
from ...runtime.heap import heap_bytes
from ...runtime.tenant_cache import TenantCache
from ...runtime.yielding_thread import in_yielding_thread
from .masks import Family, num_mask_threads

MAX_KEPT_BYTES = 512 << 20
"""Most bytes of compiled grammars, by the memory that compiling each took, and by what the process
has allocated since its start."""
GROWTH_BYTES = 1 << 20
"""Bytes that a compiled grammar usually grows by while answers follow it. It may be 16 MiB, at
20,000 states: those count when the process is measured."""
MIN_KEPT = 16
"""Compiled grammars that are kept whatever the process has allocated."""
MAX_MEMBERS = 4
"""Most members of a family before another family is compiled."""
PATIENCE_SECONDS = 0.05
"""Longest time that a request waits for another family; where the first one took longer to compile,
none waits."""
COMPILE_SECONDS = 20.0
"""Most seconds of a compilation. The processor has checked that it takes less than two seconds of
one core, so a machine that takes longer is overloaded."""
LIMITS = QueueLimits(num_waiting=256, num_bytes=16 << 20, wait_seconds=10.0)


class NoTokenizer(GrammarError):
    """This engine follows no grammar at all."""


@dataclass(slots=True, eq=False)
class Compiled:
    """Families of a grammar: the first, or its pending or failed compilation, and all that are
    compiled."""

    grammar: bytes
    asker: Asker
    first: asyncio.Task[Family]
    families: list[Family] = field(default_factory=list)
    next: asyncio.Task[Family] | None = None
    """Family that is being compiled."""

    @property
    def num_bytes(self) -> int:
        return len(self.grammar) + sum(family.num_bytes + GROWTH_BYTES for family in self.families)


class GrammarCompiler:
    def __init__(self, folder: Path | None) -> None:
        """Begins to read the folder's tokenizer, which takes a part of a second, before the first
        grammar comes."""
        self._max_families = num_mask_threads()
        self._kept: TenantCache[bytes, Compiled] = TenantCache(MAX_KEPT_BYTES)
        self._heap_before = -1
        """Bytes that the process had allocated when its tokenizer was read; -1: it is not."""
        num_threads = min(2, usable_cores()) + 1
        self._threads = FairThreads("the compilation of its grammar", num_threads, LIMITS)
        reader = ThreadPoolExecutor(1, "tokenizer")
        self._grammars = reader.submit(_read, folder)
        reader.shutdown(wait=False)

    async def read(self) -> None:
        """Returns when the tokenizer is read, or cannot be: each request that needs it gets the
        reason."""
        with contextlib.suppress(GrammarError):
            await self._tokenizer()

    async def member(self, grammar: bytes, asker: Asker) -> tuple[LLMatcher, Family]:
        """A matcher at the grammar's start, the caller's own, who takes it out of its family's
        number at its end. Raises `GrammarError`; `Unavailable` where it is not compiled in time,
        `LimitExceeded` where too many grammars of the tenant wait."""
        key = asker.key_of(grammar)
        compiled = self._kept.get(key)
        if compiled is None or any(family.is_spent for family in compiled.families):
            compiled = Compiled(grammar, asker, self._compiling(grammar, asker))
            self._kept.put(asker.tenant, key, compiled, compiled.num_bytes)
        try:
            await asyncio.shield(compiled.first)
        except (LimitExceeded, Unavailable):
            # The grammar was not tried, so the next request tries it.
            self._kept.drop(key)
            raise
        family = await self._roomiest(compiled)
        family.num_members += 1
        self._bound(key, compiled)
        return family.root.deep_copy(), family

    def close(self) -> None:
        self._threads.close()

    async def _roomiest(self, compiled: Compiled) -> Family:
        """The grammar's family with the most room, once the first one is compiled. While all are
        large another one is compiled, which is awaited if that is quick."""
        families = compiled.families
        if not families:
            families.append(compiled.first.result())
        while (
            roomiest := min(families, key=lambda family: family.num_members)
        ).num_members >= MAX_MEMBERS:
            if len(families) == self._max_families:
                break
            following = self._grow(compiled)
            if roomiest.seconds > PATIENCE_SECONDS:
                break
            # Other grammars may be before it, and take long.
            done, _ = await asyncio.wait([following], timeout=PATIENCE_SECONDS)
            if not done or following.cancelled() or following.exception() is not None:
                break
        return roomiest

    def _grow(self, compiled: Compiled) -> asyncio.Task[Family]:
        def grown(done: asyncio.Task[Family]) -> None:
            compiled.next = None
            if not done.cancelled() and done.exception() is None:
                compiled.families.append(done.result())

        if compiled.next is None:
            compiled.next = self._compiling(compiled.grammar, compiled.asker)
            compiled.next.add_done_callback(grown)
        return compiled.next

    def _bound(self, key: bytes, compiled: Compiled) -> None:
        """Drops compiled grammars beyond what may be kept. Their answers go on."""
        if key in self._kept and self._kept[key] is compiled:
            self._kept.resize(key, compiled.num_bytes)
        while len(self._kept) > MIN_KEPT and heap_bytes() > self._heap_before + MAX_KEPT_BYTES:
            self._kept.drop_one()

    def _compiling(self, grammar: bytes, asker: Asker) -> asyncio.Task[Family]:
        compiling = asyncio.create_task(self._compile(grammar, asker))
        # All requests that wait for the grammar may have ended.
        compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
        return compiling

    async def _compile(self, grammar: bytes, asker: Asker) -> Family:
        grammars = await self._tokenizer()
        if self._heap_before < 0:
            self._heap_before = heap_bytes()
        is_slow = self._threads.has_had_much(asker.tenant)
        work = functools.partial(_family, grammars, grammar, is_slow=is_slow)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                return await self._threads.run(
                    asker.tenant,
                    len(grammar),
                    work,
                    on_begin=lambda: limit.reschedule(loop.time() + COMPILE_SECONDS),
                    computed=lambda family: family.computed_seconds,
                )
        except TimeoutError:
            raise Unavailable(
                f"compiling the grammar takes more than {COMPILE_SECONDS:g} seconds now",
                retry_after=COMPILE_SECONDS,
                code=STAGE_BUSY,
            ) from None

    async def _tokenizer(self) -> Grammars:
        return await asyncio.shield(asyncio.wrap_future(self._grammars))


def _family(grammars: Grammars, grammar: bytes, *, is_slow: bool) -> Family:
    heap_before = heap_bytes()
    start = time.perf_counter()
    text = grammar.decode(errors="replace")

    def compiled() -> tuple[LLMatcher, float]:
        return grammars.compile(text), time.thread_time()

    root, computed = in_yielding_thread(compiled, is_slow=is_slow)
    seconds = time.perf_counter() - start
    # What other threads allocate meanwhile counts as well.
    return Family(root, seconds, computed, max(0, heap_bytes() - heap_before))


def _read(folder: Path | None) -> Grammars:
    if folder is None:
        raise NoTokenizer("this engine has no tokenizer; start it with a model folder")
    try:
        return grammars_of(folder)
    except (OSError, ValueError, ModelFolderError) as fault:
        raise NoTokenizer(f"the model's tokenizer cannot be used for it: {fault}") from fault
