"""Configuration of an engine, validated once. Knows nothing about where it is read from."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .page_groups import PageKind, PageSizes, kinds_of
from .queue_policies import ALLOWED, DEFAULT, Policies, PolicyError
from .table_columns import TableColumns

BLOCK_SIZES = (16, 32, 64, 128)
MOST_DRAFTS = 31
LRU = "lru"
BY_VALUE = "value"
VALUE_WAIT = "value-wait"
EVICTIONS = (LRU, BY_VALUE, VALUE_WAIT)
MOST_SETS = 3
"""Most state sets of a row, besides one for each step in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine. All sizes are tokens unless they say blocks or bytes."""

    block_size: int = 16
    num_blocks: int
    """Pages of the KV cache; page 0 is no request's and takes what padding writes. With one page
    group a page is a KV block."""
    num_host_blocks: int = 0
    """Further blocks in host memory, for prefixes that no request uses."""
    num_staged_blocks: int = 0
    """Number of host blocks that KV blocks are copied through on their way to a disk or another
    engine, and back; 0: none."""
    num_peer_blocks: int = 0
    """Blocks of host memory through which blocks pass to and from other engines, half of them each
    way; 0: none do."""
    shares_kv_cache: bool = False
    """Whether engines of the same host may copy blocks out of this one's KV cache, and it out of
    theirs."""
    page_windows: tuple[int, ...] = (0,)
    """Window of each page group, in ascending order: positions that its layers see, their own
    included. Pages before them are given back as a sequence grows. 0: all. Empty: no layer caches
    anything, and a step computes whole texts."""
    state_pages: int = 0
    """Pages of a state set: what the state layers keep of a sequence at the beginning of a block,
    and of the block's tokens. 0: the model has no state layers."""
    page_sizes: PageSizes = PageSizes()
    max_model_len: int
    """Prompt and answer together."""
    max_num_seqs: int = 256
    """Requests that run at once."""
    spare_rows: int = 0
    """Spare rows of the executor's request table: a new request takes the seat of one that leaves
    while steps in flight still use the row of the one that left."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    long_prefill_chunk: int = 0
    """The most prompt tokens one request gets a step; 0: the whole budget."""
    async_depth: int = 2
    """Steps in flight, 1…4."""
    num_groups: int = 1
    """Disjoint groups of rows, one of which a step computes: one for each pipeline stage. At most
    `async_depth`."""
    max_draft_tokens: int = 0
    """Drafted tokens of one row and step at most; 0: none are drafted."""
    num_adapter_ranks: int = 0
    """Sum of the LoRA ranks of the adapters that the device holds at a time; 0: no adapters are
    served."""
    enable_prefix_caching: bool = True
    policy: str = DEFAULT
    """Order of waiting requests by name, and of single tiers; see `Policies.of`."""
    eviction: str = LRU
    """Order in which cached blocks that no request uses are evicted: `lru` or `value`. With
    `value-wait` it is that of `value`, and prompts wait rather than evict what is expected back."""
    attention_pivot: int = 0
    """Position at which attention over the tokens before it takes as long as all else of a token;
    0: not known."""

    def __post_init__(self) -> None:
        require(
            self.block_size in BLOCK_SIZES, "block_size", self.block_size, f"one of {BLOCK_SIZES}"
        )
        require(1 <= self.async_depth <= 4, "async_depth", self.async_depth, "1…4")
        if not 1 <= self.num_groups <= self.async_depth:
            raise ConfigError("num_groups", self.num_groups, f"1…async_depth ({self.async_depth})")
        if not 0 <= self.max_draft_tokens < min(MOST_DRAFTS + 1, self.block_size):
            allowed = (
                f"0…{min(MOST_DRAFTS, self.block_size - 1)}, less than block_size "
                f"({self.block_size})"
            )
            raise ConfigError("max_draft_tokens", self.max_draft_tokens, allowed)
        try:
            Policies.of(self.policy)
        except PolicyError:
            raise ConfigError("policy", self.policy, ALLOWED) from None
        require(self.eviction in EVICTIONS, "eviction", self.eviction, " or ".join(EVICTIONS))
        require(self.attention_pivot >= 0, "attention_pivot", self.attention_pivot, "0 or more")
        for name in ("num_host_blocks", "num_staged_blocks", "num_peer_blocks"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        windows = self.page_windows
        is_sorted = windows == tuple(sorted(windows)) and min(windows, default=0) >= 0
        require(is_sorted, "page_windows", windows, "0 or more each, in ascending order")
        require(self.state_pages >= 0, "state_pages", self.state_pages, "0 or more")
        if not self.has_cache:
            self._check_without_cache()
        require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "at least 1")
        require(self.spare_rows >= 0, "spare_rows", self.spare_rows, "0 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs ({self.max_num_seqs})",
            )
        if self.num_blocks < self.fewest_blocks:
            window = self.page_windows[-1]
            of_window = f" and a window of {window}" if window else ""
            if self.state_pages:
                of_window += f" and states of {self.state_pages} pages"
            num_groups = self.num_page_groups
            # Of all layers, as options name them.
            raise ConfigError(
                "num_blocks",
                self.num_blocks // num_groups,
                f"at least {-(-self.fewest_blocks // num_groups)} for max_model_len "
                f"{self.max_model_len}{of_window}",
            )

    def _check_without_cache(self) -> None:
        """Raises `ConfigError` for what needs blocks."""
        with_it = "with a model that caches nothing"
        is_off = not self.enable_prefix_caching
        require(is_off, "enable_prefix_caching", True, f"false {with_it}")
        is_whole = not self.long_prefill_chunk
        require(is_whole, "long_prefill_chunk", self.long_prefill_chunk, f"0 {with_it}")

    @property
    def longest_step(self) -> int:
        """Tokens of the longest step: its budget, or a text without a cache that is longer, which
        has a step of its own."""
        return max(self.max_num_batched_tokens, 0 if self.has_cache else self.max_model_len)

    @property
    def waits_to_evict(self) -> bool:
        """Whether prompts wait rather than evict what is expected back."""
        return self.eviction == VALUE_WAIT

    @property
    def has_cache(self) -> bool:
        """Whether any layer caches keys and values. A model without a cache computes a text in one
        step or not at all."""
        return bool(self.page_windows)

    @property
    def fewest_blocks(self) -> int:
        """Pages with which the longest sequence is computed while no other has any."""
        return self.num_held(self.max_model_len) + 1

    @property
    def page_kinds(self) -> tuple[PageKind, ...]:
        """Kinds of page groups."""
        return kinds_of(self.page_windows)

    @property
    def blocks_seen(self) -> tuple[int, ...]:
        """Number of blocks before a position whose pages each kind of layer needs to continue a
        sequence there, by kind; 0: all blocks. The last entry is that of state sets, if the model
        has any."""
        seen = tuple(kind.num_seen(self.block_size) for kind in self.page_kinds)
        return (*seen, 1) if self.state_pages else seen

    @property
    def num_page_groups(self) -> int:
        """Pages of a block, one for each page group."""
        return len(self.page_windows)

    @property
    def max_blocks(self) -> int:
        """Columns of a block table for each page group: as many as the longest sequence has blocks.
        With several groups the columns of each begin at a multiple of 16, which kernels ask for."""
        num_blocks = -(-self.max_model_len // self.block_size)
        return num_blocks if self.num_page_groups == 1 else -(-num_blocks // 16) * 16

    @property
    def columns(self) -> TableColumns:
        """Columns of a block table."""
        num_sets = self.async_depth + MOST_SETS if self.state_pages else 0
        return TableColumns(self.num_page_groups, self.max_blocks, self.state_pages, num_sets)

    def num_held(self, num_tokens: int) -> int:
        """Pages that a sequence of so many tokens holds at most."""
        num_pages = sum(
            len(kind.groups) * self.num_held_of(kind, num_tokens) for kind in self.page_kinds
        )
        return num_pages + self.state_pages * self._num_sets(num_tokens)

    def longest(self, num_pages: int) -> int:
        """The longest sequence, up to `max_model_len`, that fits into so many pages with page 0, in
        whole blocks."""
        lengths = range(0, self.max_model_len + self.block_size, self.block_size)
        return lengths[bisect_right(lengths, num_pages - 1, key=self.num_held) - 1]

    def num_decoding(self, num_tokens: int) -> int:
        """Pages that a sequence of so many tokens holds at most once its prompt is computed."""
        in_flight = (self.async_depth + 1) * (self.max_draft_tokens + 1)
        num_pages = sum(
            len(kind.groups) * self._num_seen(kind, num_tokens, in_flight)
            for kind in self.page_kinds
        )
        num_sets = in_flight // self.block_size + 2
        return num_pages + self.state_pages * min(num_sets, self._num_sets(num_tokens))

    def num_held_of(self, kind: PageKind, num_tokens: int) -> int:
        """Most blocks of a sequence with `num_tokens` tokens whose pages a kind of layer holds.
        With a window: the blocks in the window, and those of chunks in flight or planned."""
        in_flight = (self.async_depth + 1) * self.max_chunk + self.max_draft_tokens
        return self._num_seen(kind, num_tokens, in_flight)

    def _num_seen(self, kind: PageKind, num_tokens: int, in_flight: int) -> int:
        """Blocks that a kind's layers see of a sequence, the last positions of which are computed
        by steps in flight."""
        whole = -(-num_tokens // self.block_size)
        if not kind.window:
            return whole
        # Neither the first nor the last block need be full.
        return min(whole, -(-(kind.window + in_flight) // self.block_size) + 1)

    def _num_sets(self, num_tokens: int) -> int:
        """Most state sets that a sequence with `num_tokens` tokens holds: the set of the first
        block that a step in flight computes, one for each step in flight, and one for the next
        step."""
        whole = -(-num_tokens // self.block_size)
        return min(whole + 1, self.async_depth + 2) if num_tokens else 0

    @property
    def max_chunk(self) -> int:
        """The most prompt tokens that one request gets a step."""
        return self.long_prefill_chunk or self.longest_step

    @property
    def num_rows(self) -> int:
        """Rows of the executor's request table."""
        return self.max_num_seqs + self.spare_rows

    @property
    def most_in_flight(self) -> int:
        """Steps and draws that may be in flight; see `Executor`."""
        return 2 * self.async_depth + 1

    @property
    def num_swap_slots(self) -> int:
        """Blocks of host memory that the executor's swapper copies to and from."""
        return self.num_host_blocks + self.num_staged_blocks + self.num_peer_blocks

    @property
    def max_positions(self) -> int:
        """Most positions that one step samples from: one a request, and one a draft."""
        return self.max_num_seqs + self.max_draft_tokens


class ConfigError(ValueError):
    """A setting that cannot be served; names the field, its value and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} is {value!r}; allowed: {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed

    def of(self, whole: str) -> ConfigError:
        """The same error of a part of `whole`."""
        return ConfigError(f"{self.name} of {whole}", self.value, self.allowed)


def require(is_met: object, name: str, value: object, allowed: str) -> None:
    """Raises `ConfigError` of a field, its value and what is allowed, unless the condition
    holds."""
    if not is_met:
        raise ConfigError(name, value, allowed)
