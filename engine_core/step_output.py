"""Output of the engine after a step, in columns. Crosses from the core to the server, so it holds
plain data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from .queue_policies import DEFAULT
from .request import FinishReason, TokenLogprobs

MAX_RESIDENT = 256
MAX_TENANTS = 64
"""Adapters that a report of load names."""


@dataclass(slots=True, kw_only=True)
class Started:
    """A request's prompt is computed."""

    key: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    policy: str = DEFAULT
    """Queue policy under which it waited."""
    fcfs_queue_seconds: float = 0.0
    """Estimated seconds that it would have waited in order of arrival."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """Number of cached tokens that came from elsewhere than the device's cache: host, disk,
    peer."""


@dataclass(slots=True, kw_only=True)
class Work:
    """Work for a request, over all the times it held a row, tokens that were computed past its end
    included."""

    num_preemptions: int
    num_steps: int
    mean_batch: float
    """Mean number of requests in its steps."""
    num_draft_tokens: int = 0
    """Drafted tokens that were verified."""
    num_accepted_tokens: int = 0
    """Number of accepted drafted tokens."""
    kv_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of pages that it held at its end, by kind of layer as in `EngineLoad`; empty: none, or
    unknown."""


@dataclass(slots=True, kw_only=True)
class Finished:
    """A request ended; its tokens, if any, are in the same or earlier outputs."""

    key: int
    reason: FinishReason
    num_output_tokens: int
    stop_token_id: int | None = None
    error: str = ""
    retry_seconds: float = 0.0
    """Seconds after which another attempt may succeed; set for a refused request."""
    work: Work | None = field(default=None, compare=False)
    """How it was answered; None for a request that never was in the queue."""


@dataclass(slots=True)
class StoredChain:
    """Blocks that can now be hit: a chain that continues `parent` (a block hash, or empty at its
    start)."""

    parent: bytes
    hashes: list[bytes]


@dataclass(slots=True, kw_only=True)
class CacheEvents:
    """Changes to the prefix cache; `removed` happened before `stored`, `cleared` before both."""

    stored: list[StoredChain] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    cleared: bool = False


@dataclass(slots=True, kw_only=True)
class PromptLogprobsPart:
    """Log probabilities of prompt tokens from `first_position` on; position 0 has none."""

    key: int
    first_position: int
    entries: list[TokenLogprobs]
    last: bool


@dataclass(slots=True, kw_only=True)
class MasksWanted:
    """Requests whose grammar masks are wanted: request keys[i] has rows[i] of the mask table and
    needs a mask for output output_indices[i] and each later one (see `Engine.masks_filled`), after
    its grammar has read all earlier tokens. With draft_ids[i], a mask for each draft as well, as if
    the drafts before it were accepted."""

    keys: list[int]
    rows: list[int]
    tickets: list[int]
    """Tickets that `masks_filled` has to return with each mask."""
    output_indices: list[int]
    draft_ids: list[list[int]] = field(default_factory=list)
    """Drafts of each request; empty where no request has any."""


@dataclass(slots=True, kw_only=True)
class MaskReport:
    """Masks that are wanted from now on, or tokens that were drawn under masks: num_tokens[i] of
    request keys[i]."""

    wanted: MasksWanted | None = None
    keys: list[int] = field(default_factory=list)
    """Requests that got tokens and have not ended."""
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Tokens of all requests, concatenated."""


@dataclass(slots=True, kw_only=True)
class DiskUse:
    """Figures of the engine's blocks on a disk."""

    num_blocks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    num_written: int = 0
    """Tokens whose keys and values were written, so far, as all below."""
    num_read: int = 0
    """Tokens whose keys and values were read."""
    num_damaged: int = 0
    """Blocks whose files were gone, torn or of something else."""
    failure: str = ""
    """Why nothing is written or read any more; empty: it is."""


@dataclass(slots=True, kw_only=True)
class PeerUse:
    """Counts of blocks that were transferred between this engine and others, so far."""

    num_pulled: int = 0
    """Tokens whose keys and values other engines sent."""
    num_prefetched: int = 0
    """Pulled tokens that came before their request did."""
    num_lent: int = 0
    """Tokens whose keys and values were copied for other engines."""
    num_lent_from_tiers: int = 0
    """Lent blocks that were not in the KV cache, but in host memory or on the disk."""
    num_direct: int = 0
    """Pulled tokens whose keys and values were copied out of another engine's KV cache."""
    num_discarded: int = 0
    """Blocks that other engines were thought to hold, and that did not come or were not what was
    asked for."""
    num_leases: int = 0
    """Leases that other engines have here, now."""
    seconds_per_token: float = 0.0
    """Time in which a token comes from another engine, lately."""


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """How busy the core is, now."""

    num_running: int = 0
    num_waiting: int = 0
    num_prefill_tokens: int = 0
    """Uncached prompt tokens still to compute."""
    num_used_blocks: int = 0
    """Blocks held by requests, or by loads from host memory for one."""
    num_total_blocks: int = 0
    """Blocks of the pool, as are used ones: of all layers, with a page of each page group."""
    num_pages_by_window: dict[str, int] = field(default_factory=dict)
    """Pages in block tables of requests, by the window of their layers, 0 for all keys, or `state`;
    empty with one page group and no state layers. `snapshot`: pages of snapshots that can be found,
    those in block tables included. All pages are equally large."""
    wasted_bytes: dict[str, int] = field(default_factory=dict)
    """Unused bytes of pages in block tables of requests, keyed as `num_pages_by_window`: padding of
    pages, and slots after the last token; empty where sizes are not known."""
    kv_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of pages in block tables of requests, by kind of their layers: full, window, latent or
    state. `snapshot`: of snapshots that can be found, those in block tables included. Empty where
    sizes are not known."""
    num_used_host_blocks: int = 0
    """Blocks in host memory that hold a copy."""
    num_total_host_blocks: int = 0
    num_wasted_slots: int = 0
    """Number of KV slots in used blocks after the last known token of their sequence."""
    num_preemptions: int = 0
    """Preemptions so far; all below counts so far, too."""
    num_kept_blocks: int = 0
    """Cached blocks that no request uses and that a hint keeps."""
    eviction_cost: float = 0.0
    """Mean number of prompt tokens that each token placed here makes others compute again, by what
    it evicts; 0: nothing of value, or unknown."""
    num_copied_blocks: int = 0
    """Partly filled blocks that were copied for sequences that begin alike."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_generated_tokens: int = 0
    num_swapped_out: int = 0
    """Tokens whose keys and values were copied to host memory."""
    num_swapped_in: int = 0
    """Tokens whose keys and values came back."""
    hits_by_tier: dict[str, int] = field(default_factory=dict)
    """Hit tokens that a block source brought, by its tier."""
    seconds_per_hit_token: float = 0.0
    """Time until a cached prompt token could be used, lately: what block sources had to bring, over
    all hits."""
    num_resumed_kept: int = 0
    """Tokens of preempted requests that ran again whose blocks the device still had."""
    num_resumed_loaded: int = 0
    """Tokens of resumed requests that a block source brought back."""
    num_resumed_computed: int = 0
    """Tokens of resumed requests that were computed again."""
    disk: DiskUse | None = None
    """Use of the disk; None without blocks on one."""
    peers: PeerUse | None = None
    """Blocks of other engines; None without a link to any."""
    num_drafts: int = 0
    """Number of verified drafts, each of one request in one step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Number of accepted drafted tokens."""
    num_accepted_by_position: list[int] = field(default_factory=list)
    """Number of drafts whose i-th token was accepted; the sum is that of accepted tokens."""
    num_drafter_bytes: int = 0
    """Memory that drafters hold, now."""
    policy: str = DEFAULT
    """Order of waiting requests, by tier."""
    resident_adapters: list[bytes] = field(default_factory=list)
    """Hashes of the adapters on the device that were used last; at most `MAX_RESIDENT`."""
    tenants: dict[str, float] = field(default_factory=dict)
    """Weights of tenants that have requests here, of an engine that can sleep; at most
    `MAX_TENANTS`."""
    sleep_state: str = "awake"
    """A value of `SleepState`."""
    can_sleep: bool = False
    """Whether the engine was started to sleep."""
    num_sleeps: int = 0
    """Sleeps so far."""
    sleep_seconds: float = 0.0
    """Time from the call to sleep until memory was given back, the last time."""
    wake_seconds: float = 0.0
    """Time to bring memory back, the last time."""
    num_releasable_bytes: int = 0
    """Bytes of weights, and of the KV cache where it goes as well, that sleep gives back."""
    num_released_bytes: int = 0
    """Bytes that are given back, while asleep."""
    num_held_bytes: int = 0
    """Bytes of weights that stay on the device when the engine dies."""
    sleep_problem: str = ""
    """Why the engine did not wake; empty: it did, or was not called."""
    sleep_call: int = 0
    """Number of the last call to sleep or to wake that was taken."""


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """Row i speaks of request keys[i]: num_tokens[i] new tokens, the first being output
    first_index[i]."""

    step: int
    keys: list[int] = field(default_factory=list)
    first_index: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Tokens of all rows, concatenated."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Keyed by position in token_ids, for requests that asked."""
    starts: list[Started] = field(default_factory=list)
    finishes: list[Finished] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobsPart] = field(default_factory=list)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """Keyed by key: float32 [hidden size]; the request's finish is in the same output."""
    cache_events: CacheEvents | None = None
