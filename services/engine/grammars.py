"""Compiles the grammars of requests in threads of their own: others do not wait for them.

Copies of a compiled grammar share what was found out about its tokens, and a lock on it: those of
one compilation are followed one after another. A grammar that many follow at once is therefore
compiled again, while the first ones go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from llguidance import LLMatcher

from headwater.engine_core.usable_cores import usable_cores

from ..grammars.grammars import GrammarError, Grammars
from ..models.manifest import ModelFolderError
from .masks import Family, num_mask_threads

MAX_KEPT = 256
"""Compiled grammars."""
MAX_MEMBERS = 4
"""Members of a family, before it gets another one beside it."""
PATIENCE_SECONDS = 0.05
"""Longest time that a request waits for another family; where the first one took longer to compile,
none waits."""
COMPILE_SECONDS = 10.0
"""The processor has seen it compile in less."""


class NoTokenizer(GrammarError):
    """This engine follows no grammar at all."""


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar's families: the first, or that it is under way or failed, and all that are
    there."""

    first: asyncio.Future[Family]
    families: list[Family] = field(default_factory=list)
    next: asyncio.Future[Family] | None = None
    """Family that is being compiled."""


class GrammarCompiler:
    def __init__(self, folder: Path | None) -> None:
        """Begins to read the folder's tokenizer: a part of a second that no first grammar shall
        wait for."""
        self._max_families = num_mask_threads()
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._threads = ThreadPoolExecutor(min(2, usable_cores()), "grammar")
        self._grammars = self._threads.submit(_read, folder)

    async def read(self) -> None:
        """Returns when the tokenizer is read, or cannot be: each request that needs it will be told
        why."""
        with contextlib.suppress(GrammarError):
            await asyncio.wrap_future(self._grammars)

    async def member(self, grammar: bytes) -> tuple[LLMatcher, Family]:
        """A matcher at the grammar's start, the caller's own, who takes it out of its family's
        number at its end. Raises `GrammarError`."""
        key = blake2b(grammar, digest_size=16).digest()
        if key not in self._kept:
            self._kept[key] = Compiled(self._compiling(grammar))
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        compiled = self._kept[key]
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                await asyncio.shield(compiled.first)
        except TimeoutError:
            raise GrammarError(
                f"compiling it takes more than {COMPILE_SECONDS:g} seconds"
            ) from None
        family = await self._roomiest(compiled, grammar)
        family.num_members += 1
        return family.root.deep_copy(), family

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _roomiest(self, compiled: Compiled, grammar: bytes) -> Family:
        """The grammar's family with the most room, once the first one is there. While all are large
        another one is compiled; it is waited for if that does not take long."""
        families = compiled.families
        if not families:
            families.append(compiled.first.result())
        while (
            roomiest := min(families, key=lambda family: family.num_members)
        ).num_members >= MAX_MEMBERS:
            if len(families) == self._max_families:
                break
            following = self._grow(compiled, grammar)
            if roomiest.seconds > PATIENCE_SECONDS:
                break
            # Other grammars may be before it, and take long.
            done, _ = await asyncio.wait([following], timeout=PATIENCE_SECONDS)
            if not done or following.cancelled() or following.exception() is not None:
                break
        return roomiest

    def _grow(self, compiled: Compiled, grammar: bytes) -> asyncio.Future[Family]:
        def grown(done: asyncio.Future[Family]) -> None:
            compiled.next = None
            if not done.cancelled() and done.exception() is None:
                compiled.families.append(done.result())

        if compiled.next is None:
            compiled.next = self._compiling(grammar)
            compiled.next.add_done_callback(grown)
        return compiled.next

    def _compiling(self, grammar: bytes) -> asyncio.Future[Family]:
        compiling = asyncio.get_running_loop().run_in_executor(
            self._threads, self._compile, grammar
        )
        # Whoever waits for it may all have gone.
        compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
        return compiling

    def _compile(self, grammar: bytes) -> Family:
        grammars = self._grammars.result()
        start = time.perf_counter()
        root = grammars.compile(grammar.decode(errors="replace"))
        return Family(root, time.perf_counter() - start)


def _read(folder: Path | None) -> Grammars:
    if folder is None:
        raise NoTokenizer("this engine has no tokenizer; start it with a model folder")
    try:
        return Grammars(folder)
    except (OSError, ValueError, ModelFolderError) as fault:
        raise NoTokenizer(f"the model's tokenizer cannot be used for it: {fault}") from fault
