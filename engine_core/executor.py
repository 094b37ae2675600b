"""The contract between the scheduler and whatever computes a step.

An executor keeps a *request table*: row r holds a request's token ids (prompt, then outputs), its
block table and its sampling state. A plan names rows and positions only. A sampled token is written
into the row by the executor itself, so a later plan may read it before the scheduler has seen it:
that is what lets plans run ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .request import TokenLogprobs
from .sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
UInt8Array = npt.NDArray[np.uint8]
NO_UPDATES: Int32Array = np.empty(0, np.int32)
NO_ADAPTER = -1
NO_COPIES: Int32Array = np.empty((0, 2), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRow:
    """A request that takes a row of the table: first admission, or again after a preemption."""

    row: int
    token_ids: Int32Array
    """All known tokens: prompt and outputs so far. Read-only."""
    num_prompt_tokens: int
    sampling: SamplingParams
    choice_index: int
    adapter: int = NO_ADAPTER
    """Slot of its adapter."""


class AdapterPlace(NamedTuple):
    """Place of an adapter in memory that several ranks map, in bytes."""

    begin: int
    num_bytes: int
    stride: int
    """Distance between the starts of two ranks' parts."""
    num_ranks: int
    """The adapter's padded rank."""


class AdapterCopy(NamedTuple):
    """An adapter that is copied to a slot of the device before the rows of its plan are
    computed."""

    slot: int
    digest: bytes
    place: AdapterPlace | None = None
    """Where the ranks of an engine find the adapter; None: the engine has one rank, which knows
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, in columns. Row i of a column speaks of table row rows[i]; all columns have the
    same length R.

    Apply in this order: released, admitted, block updates, copied blocks, then compute.
    """

    step: int
    released: list[int] = field(default_factory=list)
    """Table rows whose request left; they may be taken by `admitted` of the same plan."""
    admitted: list[AdmittedRow] = field(default_factory=list)
    block_rows: Int32Array = field(default_factory=lambda: NO_UPDATES)
    """[U] table rows of new block-table entries."""
    block_indices: Int32Array = field(default_factory=lambda: NO_UPDATES)
    """[U] their column: g max_blocks + i of the page of group g that holds block i of the
    sequence."""
    block_ids: Int32Array = field(default_factory=lambda: NO_UPDATES)
    """[U] page that is written there."""
    rows: Int32Array
    """[R] table rows computed in this step, each once."""
    starts: Int32Array
    """[R] position of the first token computed."""
    counts: Int32Array
    """[R] tokens computed: positions starts … starts + counts − 1."""
    samples: BoolArray
    """[R] whether a token is sampled after the last one (false for a prompt chunk that is not the
    last)."""
    output_indices: Int32Array
    """[R] output index of the first token that is sampled; enters its noise. The token is written
    at position starts + counts − drafts."""
    holds: BoolArray
    """[R] whether the logits that would be sampled from are kept for a `DrawPlan`; never of a row
    that samples."""
    num_drafts: Int32Array | None = None
    """[R] how many of the tokens that a row computes, the last ones, are drafted; None: none are. A
    token is sampled after each of them and after the one before them, with that position's own
    noise, as if the drafts before it stood; the row gains what was sampled up to the first token
    that differs from the draft in its place."""
    draft_ids: Int32Array | None = None
    """[sum of num_drafts] row by row, where there are any; the executor writes them into its table
    before it computes. None: an executor that can drafts by itself, up to num_drafts[i] tokens."""
    follows: BoolArray | None = None
    """[R] rows that have drafts in a plan before this one whose result is not retired. What they
    gain there is known to the executor alone, so they go on behind their last token wherever that
    is: `starts` is the last position at which it may be, and `output_indices` belong to that. None:
    no row does."""
    copied_blocks: Int32Array = field(default_factory=lambda: NO_COPIES)
    """[C, 2] pages whose contents go into other pages before anything is computed: from,
    to."""
    copied_adapters: list[AdapterCopy] = field(default_factory=list)
    """Adapters that go to slots of the device before anything is computed."""
    shares: bool = True
    """Whether rows may hold blocks in common; if not, nobody need look for them."""
    prompt_logprob_rows: list[int] = field(default_factory=list)
    """Table rows whose log probabilities are wanted for the prompt positions computed in this
    step."""
    pooled_rows: list[int] = field(default_factory=list)
    """Table rows whose hidden states are pooled. The step that computes a row's last token returns
    its vector."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the plan computes."""
        return int(self.counts.sum())

    @property
    def num_attended(self) -> int:
        """Positions that tokens attend to, summed over all tokens: each counts up to its row's last
        token."""
        return int(np.dot(self.counts.astype(np.int64), self.starts + self.counts))

    def written_blocks(self, block_size: int) -> Int32Array:
        """Blocks that rows get with this plan and that no step has computed yet: [at most U]. With
        one page group, as beside every swapper."""
        computed = np.zeros(
            int(max(self.block_rows.max(initial=0), self.rows.max(initial=0))) + 1, np.int32
        )
        computed[self.rows] = self.starts // block_size
        return self.block_ids[self.block_indices >= computed[self.block_rows]]

    @property
    def looks_at_all(self) -> bool:
        """Whether hidden states of tokens are wanted that are not a row's last."""
        return bool(self.prompt_logprob_rows or self.pooled_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPlan:
    """Samples for rows whose logits an earlier plan holds, now that their masks are known. It
    computes no tokens, so a late mask delays its own row alone."""

    step: int
    """Numbered with the steps."""
    rows: Int32Array
    """[S] table rows, each once."""
    positions: Int32Array
    """[S] where the first token is written."""
    output_indices: Int32Array
    """[S] of the first token."""
    masks: Int32Array
    """[positions, table rows, words], the same array in every plan: bit i of word w stands for
    token 32 w + i, whether it may be sampled at that one of the row's held positions. Those of
    `rows` stay as they are until the plan retires."""
    num_drafts: Int32Array | None = None
    """[S] drafted tokens that the row's held plan computed; see `StepPlan.num_drafts`. None:
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Sampled tokens of a step: entry j belongs to the j-th plan row with samples set, or to row j
    of a draw."""

    token_ids: Int32Array
    """[S, n]; of entry j the first num_tokens[j] count, what stands after them is arbitrary."""
    num_tokens: Int32Array
    """[S] tokens that the row gained, 1…n: its accepted drafts, and one more."""
    num_drafts: Int32Array | None = None
    """[S] tokens that the executor drafted by itself; None where it was not asked to."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Keyed by n j + i for token i of entry j, for rows that asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Keyed by table row: one entry for each position computed whose next token lies in the prompt;
    entry i of a plan row starting at s is the log probability of the prompt token at position s + i
    + 1."""
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """Keyed by table row: float32 [hidden size] of prompts that are pooled."""


NO_RESULT = StepResult(token_ids=np.empty((0, 1), np.int32), num_tokens=np.empty(0, np.int32))
"""The result of a step that samples for no row."""


def no_places() -> Int32Array:
    """Empty list of blocks or slots, for a plan without copies in that direction."""
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """Copies of whole KV blocks to slots of host memory and back, beside the steps. Copies out come
    first."""

    out_blocks: Int32Array = field(default_factory=no_places)
    """[N] blocks that are not written before they are given to a row again."""
    out_slots: Int32Array = field(default_factory=no_places)
    """[N]"""
    in_slots: Int32Array = field(default_factory=no_places)
    """[M]"""
    in_blocks: Int32Array = field(default_factory=no_places)
    """[M] no plan lists them before the copies are done."""


class Swapper(Protocol):
    """Copies blocks in the order of the plans, without waiting. A step that writes to a block which
    is to be copied out waits for that copy, as does whatever reads a slot."""

    def swap(self, plan: SwapPlan) -> None:
        """Begins the copies. Copies out of the device may be launched later: what they read was
        written by retired steps, or by plans before this one."""

    @property
    def num_saved(self) -> int:
        """Number of blocks of all plans so far whose copies to their slots are complete; blocks are
        copied in order."""

    @property
    def num_loaded(self) -> int:
        """Number of blocks loaded by all plans so far; they are loaded in order."""

    @property
    def slots(self) -> UInt8Array:
        """The host memory: [slots, bytes of a block]. A slot may be read once its copy is whole,
        and written while no copy reads it."""

    @property
    def seconds_per_block(self) -> float:
        """Time in which a block comes back, of many; 0 where it takes none."""

    @property
    def direct_copies(self) -> DirectCopies | None:
        """The copies out of other engines' KV caches, where engines of this host may copy from each
        other."""


class DirectCopy(Protocol):
    """Blocks that are being copied out of another engine's KV cache."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is read or written for it any more."""


class DirectCopies(Protocol):
    """Copies of whole KV blocks from the KV cache of another engine of this host into this one's,
    beside the steps."""

    @property
    def handle(self) -> bytes:
        """Handle by which another engine opens this one's KV cache."""

    @property
    def seconds_per_block(self) -> float:
        """Time that a copied block is taken to need before one was measured."""

    def copy(self, handle: bytes, sources: Int32Array, targets: Int32Array) -> DirectCopy:
        """Launches the copies of blocks `sources` [N] of the KV cache with that handle to blocks
        `targets` [N] of this one, which no plan lists before they are done. Raises `OSError`
        where the cache cannot be reached from here."""

    def close(self, handle: bytes) -> None:
        """Closes another engine's KV cache if it is open; none of its blocks is being copied. It
        may be opened again."""


class AdapterFacts(NamedTuple):
    """An adapter in host memory."""

    digest: bytes
    """Hash of its content."""
    rank: int
    num_ranks: int
    """Number of LoRA ranks that it takes in a slot of the device."""
    num_bytes: int
    """Bytes of host memory."""


class HostAdapters(Protocol):
    """Adapters in host memory, from where plans have them copied to slots of the device."""

    @property
    def num_ranks(self) -> int:
        """Sum of the LoRA ranks of the adapters that the device holds at a time; 0: no adapters are
        served."""

    def read(self, folder: Path) -> AdapterFacts:
        """Reads, checks and keeps an adapter; one that is already loaded is kept once. Thread-safe.
        Raises `ConfigError` for an adapter that cannot be served."""

    def drop(self, digest: bytes) -> None:
        """Forgets an adapter that no later plan copies."""


@runtime_checkable
class TakesAdapters(Protocol):
    """An executor whose plans may copy adapters to slots."""

    @property
    def host_adapters(self) -> HostAdapters | None:
        """Adapters in host memory; None: its device has no slots."""


class MemoryShort(Exception):
    """A device lacks the memory that an engine had before it slept."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"the engine needs {wanted} bytes of its device, of which {free} are free")
        self.wanted = wanted
        self.free = free


class ReleasableMemory(Protocol):
    """Memory that an engine releases while it sleeps. Addresses stay reserved, so tensors, recorded
    steps and graphs stay valid."""

    @property
    def keeps_cache(self) -> bool:
        """Whether the KV cache keeps its contents during sleep: it lies in host memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are here while the engine is awake."""

    def release(self) -> int:
        """Gives the memory back, with no plan in flight and no copy of blocks under way. Weights
        stay within reach of the host, keys and values are lost unless `keeps_cache`. Returns the
        bytes that were given back."""

    def restore(self) -> None:
        """Takes the memory again; the contents of the KV cache are undefined then. Raises
        `MemoryShort`, and changes nothing then."""


@runtime_checkable
class Sleeps(Protocol):
    """An executor whose engine may sleep."""

    @property
    def releasable(self) -> ReleasableMemory | None:
        """Memory that sleep gives back; None where it was not asked for at the start."""


def releasable_of(executor: object) -> ReleasableMemory | None:
    """Memory that an executor gives back while its engine sleeps; None: it keeps all."""
    return executor.releasable if isinstance(executor, Sleeps) else None


class NewWeights(Protocol):
    """Loaded weights that can replace those in use."""

    @property
    def numerics_id(self) -> str:
        """See `ModelFacts`."""


class ReplaceableWeights(Protocol):
    """Weights of an executor that can be replaced by weights of the same shapes."""

    def load(self, folder: Path) -> NewWeights:
        """Loads the weights of a converted model's folder. From any thread, beside steps; changes
        nothing. Raises `ConfigError` where anything but the weights differs."""

    def adopt(self, new: NewWeights) -> None:
        """Later steps are computed with these weights. No plan is in flight, and no block is
        cached."""


@runtime_checkable
class TakesWeights(Protocol):
    """An executor whose weights may be replaced."""

    @property
    def replaceable(self) -> ReplaceableWeights | str:
        """The weights that may be replaced, or a text that says why they may not."""


def replaceable_of(executor: object) -> ReplaceableWeights | str:
    """Weights that may be replaced, or why not."""
    if isinstance(executor, TakesWeights):
        return executor.replaceable
    return "allowed: an engine of one process on a CPU, of a model's folder"


class Executor(Protocol):
    """Computes plans in the order given. Up to `2 * async_depth + 1` of them, `async_depth` of
    which may be steps, are submitted before the first is retired. Handles are consecutive numbers,
    so each has a place of its own in a ring of that length."""

    @property
    def swapper(self) -> Swapper | None:
        """The copies to and from host memory, where the config has blocks there."""

    @property
    def copies_blocks(self) -> bool:
        """Whether its plans may copy blocks."""

    @property
    def can_draft(self) -> bool:
        """Whether the executor drafts by itself when a plan asks it to."""

    @property
    def computes_at_once(self) -> bool:
        """Whether `submit` and `draw` return when the plan is computed: nothing runs beside the
        caller."""

    @property
    def prefill_seconds(self) -> float:
        """Seconds to compute a prompt token, if known before any step was measured; else 0."""

    def submit(self, plan: StepPlan) -> int:
        """Launches a plan and returns its handle without waiting for the result, unless it
        `computes_at_once`."""

    def draw(self, plan: DrawPlan) -> int:
        """Like `submit`, for a plan that only draws."""

    def retire(self, handle: int) -> StepResult:
        """Waits for the oldest plan in flight, which is `handle`, and returns what it sampled."""

    def is_ready(self, handle: int) -> bool:
        """Whether `retire` would return without waiting."""

    def warm_up(self) -> float:
        """Does before anything is served what the first steps would otherwise wait for: memory that
        is touched for the first time, libraries and threads that begin. To be called once, with
        nothing in flight; leaves nothing behind but in the scratch block.

        Returns the estimated seconds of a step of the whole budget; 0: not known."""

    def prepare(self) -> bool:
        """Makes later steps faster while nothing is in flight; takes well under a second. Whether
        more is left."""

    def close(self) -> None:
        """Gives back memory, threads and devices."""
