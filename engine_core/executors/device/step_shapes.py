"""Sizes that launches are made for, so that a few graphs serve all steps. Knows what a step
computes, not how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from ...config import EngineConfig
from ...executor import Int32Array, StepPlan
from ...platforms.cuda_attention_plans import DEPENDENT_ROWS, SHARING_ROWS, AttentionPlans

ROWS = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32), *range(576, 1025, 64))
"""Numbers of rows that decode steps are padded to."""
FIRST_ROWS = (1, 8, 64)
"""Numbers of rows whose launches an engine has before it serves, beside the largest number."""
FEW = 64
"""Decoding rows or chunks beside which a step with prompt tokens has room for few or for all."""
MOST_PADDED = 2048
"""Tokens up to which the time to launch a step without a graph shows; past it only the largest step
recurs."""
PROBED_ROWS = (17, 32, 48, 64, 99, 128, 192, 201, 256, 384, 512, 768, 1024, 2048)
"""Numbers of rows from every range in which a library may choose another algorithm: padded sizes of
steps, and odd ones, as draws have."""
NO_TILES: Int32Array = np.empty((0, 2), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Shape that launches are made for. A step fills part of it; the rest is padding: rows -1,
    lengths 0, tiles -1."""

    num_tokens: int
    num_decodes: int
    """Number of leading tokens that belong to decode rows, padding included; tokens of chunks fill
    padded places."""
    num_chunks: int = 0
    num_tiles: int = 0
    num_ends: int = 0
    """Rows of a step with prompt tokens whose last tokens' hidden states are all that comes out; 0:
    of all tokens."""
    shares: bool = False
    """Whether requests may hold blocks in common."""
    has_adapters: bool = False
    """Whether rows may have adapters."""

    @property
    def is_decode(self) -> bool:
        return not self.num_tiles

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the columns of `step_buffers.Words`."""
        tokens = self.num_tokens
        decodes = self.num_decodes
        chunks = self.num_chunks
        ends = self.num_ends
        return (
            tokens,
            tokens,
            decodes,
            decodes,
            chunks,
            chunks,
            chunks + 1,
            ends,
            ends,
            ends,
            2 * self.num_tiles,
        )

    @property
    def num_words(self) -> int:
        return sum(map(aligned, self.sizes))

    def last_states(self, plan: StepPlan) -> Int32Array:
        """[R] Index of each row's last token among the hidden states that leave the last layer."""
        return (
            np.arange(len(plan.rows), dtype=np.int32)
            if self.num_ends
            else np.cumsum(plan.counts) - 1
        )


class StepShapes:
    """The shapes of one engine's steps."""

    def __init__(
        self, config: EngineConfig, plans: AttentionPlans, *, looks_at_all: bool = False
    ) -> None:
        """`looks_at_all`: the hidden states of all tokens are wanted in any step."""
        self._plans = plans
        self._looks_at_all = looks_at_all
        self._most_rows = config.max_positions
        self.most_tokens = config.max_num_batched_tokens
        self._rows = sorted({size for size in ROWS if size < self._most_rows} | {self._most_rows})
        self._num_rows_for = np.array(
            [next(r for r in self._rows if r >= n) for n in range(self._most_rows + 1)]
        )
        self.max_tiles = plans.max_tiles(self.most_tokens, self._most_rows)
        first = [size for size in self._rows if size in FIRST_ROWS or size == self._most_rows]
        # Large ones first: smaller ones then fit into the memory that those freed.
        self._ordered = first[::-1] + [size for size in self._rows[::-1] if size not in first]
        self._takes_adapters = config.num_adapter_ranks > 0
        self.num_first = 2 * len(first) if self._takes_adapters else len(first)

    def num_rows(self, count: int) -> int:
        """Number of rows of the shape that `count` rows are padded to."""
        return int(self._num_rows_for[count])

    def of(self, plan: StepPlan) -> tuple[StepShape, Int32Array]:
        """The shape of a plan, and its prompt chunks' work list."""
        n = num_decodes(plan)
        shares = plan.shares and n >= SHARING_ROWS
        if n == len(plan.rows):
            size = self.num_rows(n)
            return StepShape(num_tokens=size, num_decodes=size, shares=shares), NO_TILES
        tiles = self._plans.list_tiles(plan.counts[n:], plan.starts[n:])
        num_tokens = plan.num_tokens
        num_chunks = len(plan.rows) - n
        if MOST_PADDED < num_tokens < self.most_tokens:
            shape = StepShape(
                num_tokens=num_tokens,
                num_decodes=self._room_for(n, num_tokens),
                num_chunks=num_chunks,
                num_tiles=len(tiles),
                shares=shares,
            )
        else:
            shape = self._mixed(num_tokens, n, num_chunks, shares=shares)
        return shape if plan.looks_at_all else self._ending(shape), tiles

    def recurs(self, shape: StepShape) -> bool:
        """Whether other steps are likely to have this shape too."""
        return (
            shape.is_decode
            or shape.num_tokens <= MOST_PADDED
            or shape.num_tokens == self.most_tokens
        )

    def likely(self) -> Iterator[StepShape]:
        """Shapes that steps are likely to have, each once; the first `num_first` are made before
        the engine serves."""
        shapes = dict.fromkeys(self._all_likely())
        if not self._takes_adapters:
            return iter(shapes)
        variants = ((shape, replace(shape, has_adapters=True)) for shape in shapes)
        return chain.from_iterable(variants)

    def for_each_kernel(self) -> Iterator[StepShape]:
        """Yields enough of the likely shapes to launch every kernel of them all; what takes longest
        to compile comes first."""
        noted: set[object] = set()
        for shape in sorted(self.likely(), key=lambda shape: (shape.is_decode, -shape.num_tokens)):
            # The first decides about products, the others about attention, the last of them in the
            # last layer.
            rows = shape.num_decodes, shape.shares, shape.num_tokens <= DEPENDENT_ROWS
            parts = {
                shape.num_tokens,
                (shape.num_tokens, shape.num_tiles),
                rows,
                (shape.num_ends, shape.shares),
                (shape.num_tokens, shape.num_ends, shape.has_adapters),
            }
            if not parts <= noted:
                noted |= parts
                yield shape

    def _all_likely(self) -> Iterator[StepShape]:
        for size in self._ordered:
            yield StepShape(num_tokens=size, num_decodes=size)
        yield from self._all_mixed((0, 1, FEW + 1), shares=False)
        sharing = [size for size in self._ordered if size >= SHARING_ROWS]
        for size in sharing:
            yield StepShape(num_tokens=size, num_decodes=size, shares=True)
        if sharing:
            yield from self._all_mixed((SHARING_ROWS, FEW + 1), shares=True)

    def _all_mixed(self, numbers_of_decodes: Iterable[int], *, shares: bool) -> Iterator[StepShape]:
        for num_decodes in (min(number, self._most_rows) for number in numbers_of_decodes):
            for num_tokens in (*_PADDED_TOKENS, self.most_tokens):
                if num_decodes < num_tokens <= self.most_tokens:
                    yield self._ending(self._mixed(num_tokens, num_decodes, 1, shares=shares))
            if self._most_rows > FEW:
                yield self._ending(
                    self._mixed(self.most_tokens, num_decodes, FEW + 1, shares=shares)
                )

    def _mixed(
        self, num_tokens: int, num_decodes: int, num_chunks: int, *, shares: bool
    ) -> StepShape:
        num_tokens = min(_padded(num_tokens), self.most_tokens)
        num_chunks = min(self._room(num_chunks), num_tokens)
        return StepShape(
            num_tokens=num_tokens,
            num_decodes=self._room_for(num_decodes, num_tokens),
            num_chunks=num_chunks,
            num_tiles=self._plans.max_tiles(num_tokens, num_chunks),
            shares=shares,
        )

    def _ending(self, shape: StepShape) -> StepShape:
        """The same, but only the rows' last tokens leave the last layer, where that is much less.
        However many chunks there are, their room is one of two: what the last layer launches was
        launched before."""
        if self._looks_at_all:
            return shape
        num_rows = shape.num_decodes + self._room(shape.num_chunks)
        num_ends = self.num_rows(min(num_rows, self._most_rows))
        return replace(shape, num_ends=num_ends) if 2 * num_ends <= shape.num_tokens else shape

    def _room(self, count: int) -> int:
        return FEW if count <= FEW else self._most_rows

    def _room_for(self, num_decodes: int, num_tokens: int) -> int:
        """Decoding rows of a step with prompt tokens, padded: kernels are compiled for the sizes of
        decode steps."""
        return min(self._room(num_decodes), self._most_rows, num_tokens) if num_decodes else 0


def probed_rows(most: int, most_decodes: int) -> tuple[int, ...]:
    """Numbers of rows for which products are probed that may have up to `most`."""
    sizes = {*PROBED_ROWS, most_decodes, most}
    if most > MOST_PADDED:
        # Such steps have any number of tokens.
        sizes.add((MOST_PADDED + most) // 2 | 1)
    return tuple(sorted(size for size in sizes if size <= most))


def num_decodes(plan: StepPlan) -> int:
    """Number of rows with one token at the beginning of a plan; a row with one token after them is
    a chunk."""
    longer = np.flatnonzero(plan.counts != 1)
    return int(longer[0]) if len(longer) else len(plan.rows)


def aligned(num_words: int) -> int:
    """Rounds up to 16 bytes, for which kernels are compiled."""
    return -(-num_words // 4) * 4


def _padded(num_tokens: int) -> int:
    """Rounded up, by an eighth at most, except for small numbers, where reading the weights takes
    the time."""
    grain = max(32, (1 << (num_tokens - 1).bit_length()) // 16)
    return -(-num_tokens // grain) * grain if num_tokens <= MOST_PADDED else num_tokens


_PADDED_TOKENS = sorted({_padded(num_tokens) for num_tokens in range(1, MOST_PADDED + 1)})
