"""Sequences that begin alike to the token: the partly filled last block of one is copied for the
next, which would otherwise compute it again.

A fork waits until the sequence before it has its prompt in a step, and gets a copy of that one's
last block with the next step: executors compute steps in order, so that the copy finds what was
written. Knows nothing about budgets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...kv.block_pool import BlockPool
from ...kv.prefix_cache import HashChain
from ...kv.prefix_hash import next_block_hash, token_bytes
from ...kv.value.turn import Turn
from ...page_groups import page_key
from ..table.request_state import RequestState

WHOLE = 1 << 30
"""More blocks than any prompt has: what waits for so many waits until all is scheduled."""


class PartialBlock(NamedTuple):
    """A block whose first tokens a fork has as well."""

    pages: list[int]
    """Pages of the block by page group."""
    num_tokens: int


NO_PARTIAL = PartialBlock([], 0)


class Follow(NamedTuple):
    """A wait for a request that computes the same prefix, until so many blocks are scheduled."""

    leader: RequestState
    num_blocks: int


class Forks:
    """Copies that were planned hold their blocks until the step has retired."""

    def __init__(
        self,
        pool: BlockPool,
        pages_at: Callable[[RequestState, int], list[int]],
        block_size: int,
        num_pages: int,
        *,
        is_on: bool,
    ) -> None:
        """`pages_at`: the `num_pages` pages of a block of a request's row, or none where it lacks
        some. `is_on`: the executor copies blocks."""
        self.num_copies = 0
        """Number of blocks copied so far."""
        self._pool = pool
        self._pages_at = pages_at
        self._is_on = is_on
        self._block_size = block_size
        self._num_pages = num_pages
        self._whole: list[RequestState] = []
        """Requests whose last known tokens are in the step that was planned last."""
        self._fresh = set[bytes]()
        """Keys of blocks that this step fills: they are not copied before the next one."""
        self._copied: deque[tuple[int, int, Turn]] = deque()
        """Step that copies, page that it copies from, and the kind of turn of the copy."""

    def note_whole(self, request: RequestState) -> None:
        """Notes that the step that is being planned computes the last known token of a request."""
        if self._is_on and request.forks:
            self._whole.append(request)
            self._note_last_block(request)

    def begin_step(self) -> list[Follow]:
        """Notes that the next step is planned, so blocks of the step before it can be copied.
        Returns the waits that this ends."""
        self._fresh.clear()
        whole = self._whole
        self._whole = []
        return [Follow(leader, WHOLE) for leader in whole]

    def wait_of(self, request: RequestState, prefilling: Iterable[RequestState]) -> Follow | None:
        """Waits for a request that is being computed and begins with this one's tokens: once all of
        them are scheduled, its last block can be copied."""
        if not (self._is_on and request.forks):
            return None
        for leader in (*prefilling, *self._whole):
            if leader is not request and leader.forks and _begins(request, leader):
                return Follow(leader, WHOLE)
        return None

    def take(
        self, request: RequestState, num_hits: int, num_other_pages: int, step: int
    ) -> PartialBlock:
        """The block that `step` copies for the tokens after so many hit blocks, held from now on.
        One token is left to compute. `NO_PARTIAL` where there is none, or no room to hold free
        pages beside `num_other_pages`."""
        num_tokens = request.num_tokens - num_hits * self._block_size
        if (
            not (self._is_on and request.forks)
            or not 1 < num_tokens <= self._block_size
            or request.looks_at_all
        ):
            return NO_PARTIAL
        last = request.token_ids[num_hits * self._block_size :]
        for count in (num_tokens, num_tokens - 1):
            key = _key(request, num_hits, last[:count])
            pages = self._find(key)
            if pages and key not in self._fresh:
                num_unheld = self._pool.count_unheld(pages)
                if num_unheld and num_other_pages + num_unheld > self._pool.num_free:
                    return NO_PARTIAL
                self.hold(pages, step, request.chain)
                self.num_copies += 1
                return PartialBlock(pages, num_tokens - 1)
        return NO_PARTIAL

    def hold(self, pages: Sequence[int], step: int, chain: HashChain) -> None:
        """Holds pages that `step` copies, for this chain, until it has retired."""
        self._pool.share(pages)
        turn = chain.moved_turn
        self._copied += ((step, page, turn) for page in pages)

    def retire(self, step: int) -> bool:
        """Releases blocks that steps up to this one have copied. Returns whether there were any."""
        num_before = len(self._copied)
        while self._copied and self._copied[0][0] <= step:
            _, page, turn = self._copied.popleft()
            self._pool.release([page], turn=turn, is_move=True)
        return len(self._copied) < num_before

    @property
    def held_pages(self) -> list[int]:
        """Pages that steps in flight copy."""
        return [page for _, page, _ in self._copied]

    def _find(self, key: bytes) -> list[int]:
        """Pages of a block by the name of its tokens, by page group; empty where one is gone."""
        pages = []
        for group in range(self._num_pages):
            if (page := self._pool.find_partial(page_key(key, group))) is None:
                return []
            pages.append(page)
        return pages

    def _note_last_block(self, request: RequestState) -> None:
        """Makes the last, partial block of a request's known tokens findable by its tokens."""
        idx = (request.num_tokens - 1) // self._block_size
        key = _key(request, idx, request.token_ids[idx * self._block_size :])
        if self._find(key):
            return
        for group, page in enumerate(self._pages_at(request, idx)):
            if self._pool.find_partial(page_key(key, group)) is None:
                self._pool.note_partial(page, page_key(key, group))
        self._fresh.add(key)


def _key(
    request: RequestState, idx: int, token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> bytes:
    """Names the beginning of a sequence up to the last of these tokens, the first of which fill
    block `idx`."""
    return next_block_hash(request.chain.base_of(idx), token_bytes(token_ids))


def _begins(request: RequestState, leader: RequestState) -> bool:
    """Whether a leader's known tokens are a request's too, up to its last one at least."""
    num_common = min(request.num_tokens, leader.num_tokens)
    own = request.chain
    theirs = leader.chain
    if num_common < request.num_tokens - 1 or (own.namespace, own.front) != (
        theirs.namespace,
        theirs.front,
    ):
        return False
    return bool((request.token_ids[:num_common] == leader.token_ids[:num_common]).all())
