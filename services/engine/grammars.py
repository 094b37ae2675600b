"""Compiles the grammars of requests, each once, in threads of their own: others do not wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from llguidance import LLMatcher

from headwater.services.grammars.grammars import GrammarError, Grammars
from headwater.services.models.manifest import ModelFolderError

MAX_KEPT = 256
"""Compiled grammars."""
COMPILE_SECONDS = 10.0
"""The processor has seen it compile in less."""


class GrammarCompiler:
    def __init__(self, folder: Path | None) -> None:
        """Begins to read the folder's tokenizer: a part of a second that no first grammar shall wait for."""
        self._kept: OrderedDict[bytes, asyncio.Future[LLMatcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(min(2, os.cpu_count() or 1), "grammar")
        self._grammars = self._threads.submit(_read, folder)

    async def read(self) -> None:
        """Returns when the tokenizer is read, or cannot be: each request that needs it will be told why."""
        with contextlib.suppress(GrammarError):
            await asyncio.wrap_future(self._grammars)

    async def matcher(self, grammar: bytes) -> LLMatcher:
        """At the grammar's start, the caller's own. Raises `GrammarError`."""
        key = blake2b(grammar, digest_size=16).digest()
        if key not in self._kept:
            compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, grammar)
            # Whoever waits for it may all have gone.
            compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._kept[key] = compiling
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return (await asyncio.shield(self._kept[key])).deep_copy()
        except TimeoutError:
            raise GrammarError(f"compiling it takes more than {COMPILE_SECONDS:g} seconds") from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: bytes) -> LLMatcher:
        return self._grammars.result().compile(grammar.decode(errors="replace"))


def _read(folder: Path | None) -> Grammars:
    if folder is None:
        raise GrammarError("this engine has no tokenizer; start it with a model folder")
    try:
        return Grammars(folder)
    except (OSError, ValueError, ModelFolderError) as fault:
        raise GrammarError(f"the model's tokenizer cannot be used for it: {fault}") from fault
