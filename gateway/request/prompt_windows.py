"""Bounds the number of prompts that each tenant has at a model's processors at once, over its
requests with several prompts.

Prompts of other tenants pass between them, however many such requests a tenant has. Knows nothing
about the work on prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from headwater.services.runtime.tasks import few_at_once

PROMPTS_AT_ONCE = 4
"""Number of prompts of a tenant: a processor never runs dry, and others wait behind little in each
pass of an event loop."""
PromptT = TypeVar("PromptT")


class PromptWindows:
    """Windows by tenant and model. Prompts enter a window in the order of their arrival, over all
    requests."""

    def __init__(self) -> None:
        self._windows: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = (
            WeakValueDictionary()
        )

    async def for_each(
        self,
        key: tuple[str, str],
        prompts: Sequence[PromptT],
        work: Callable[[PromptT], Awaitable[None]],
    ) -> None:
        """Awaits `work` for every prompt of a request; the key names tenant and model. The first
        error ends the others and is raised."""
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = asyncio.Semaphore(PROMPTS_AT_ONCE)

        async def work_within(prompt: PromptT) -> None:
            async with window:
                await work(prompt)

        await few_at_once([partial(work_within, prompt) for prompt in prompts], PROMPTS_AT_ONCE)
