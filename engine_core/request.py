"""A request as the engine sees it: one choice, token ids in, token ids out. Knows nothing about
text or sessions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .sampling_params import SamplingParams


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    UNFOLLOWABLE = "unfollowable"
    """The request's grammar cannot be followed any further."""
    BUSY = "busy"
    """The request's grammar was not compiled in time."""
    MISSING = "missing"
    """The server asked for the request, and the core does not have it."""
    REPLACED = "replaced"
    """The weights that computed it were replaced."""
    LATE = "late"
    """The first token could not have come in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Whether a request's tokens may be drafted. It changes no token, only the time they take."""

    is_on: bool = True
    drafter: str = ""
    """Name of the only drafter to use; empty: the one with the highest expected gain."""
    max_tokens: int = 0
    """Drafted tokens of a step at most; 0: as many as the engine allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Another engine that probably holds the first blocks of a prompt. This is a hint: received
    blocks are verified, and missing ones are computed."""

    address: str
    """host:port of its server."""
    epoch: int
    """Epoch (incarnation) of the holder."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """One choice to compute, as it enters the engine. It is sent from server to core, so it has
    plain data only."""

    key: int
    """Names the choice between server and core; never reused within a core's life."""
    prompt_ids: list[int]
    output_ids: list[int]
    """Resume: what was already answered. The engine goes on after it and emits from index
    len(output_ids)."""
    sampling: SamplingParams
    choice_index: int = 0
    has_grammar: bool = False
    """Each token waits for a mask that says which may come: see `Engine.masks_filled`."""
    namespace: bytes = b"\0" * 16
    """Root of the hash chain."""
    front_namespace: bytes = b""
    """Root of the leading blocks' hash chain, where other tenants share them."""
    num_front_blocks: int = 0
    """Number of these blocks; 0: none."""
    credit: int = 1 << 30
    """Tokens that may be emitted before more credit comes."""
    tier: int = 0
    """Strict priority; lower runs first."""
    virtual_time: float = 0.0
    """Fair order within a tier."""
    num_expected_tokens: int = 0
    """Tokens that its answer is predicted to have; 0: as many as it may have."""
    age_seconds: float = 0.0
    """How long ago the request came to the cluster."""
    first_token_seconds: float = 0.0
    """Goal of the request: seconds until its first token; 0: no goal."""
    token_seconds: float = 0.0
    """Goal: so much time passes from one token to the next; 0: there is none."""
    tenant: str = ""
    weight: float = 1.0
    turn_kind: str = ""
    """Word for what the next turn of the conversation waits for, or came from; empty: not known."""
    session: str = ""
    """Name of the conversation within its tenant; empty: not known."""
    cache_priority: int = 0
    """Hint: one step more doubles the value of its cached blocks."""
    keep_seconds: float = 0.0
    """Hint: seconds for which its cached blocks are kept before other blocks of its tenant; 0:
    none."""
    speculation: Speculation = Speculation()
    forks: bool = False
    """Whether other requests begin with the same prompt, so that it shares blocks with them to the
    last token."""
    holder: Holder | None = None
    adapter: bytes = b""
    """Hash of the adapter's content; empty: it has none. Part of the namespace."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens by which the model ends its answers, whether or not this request stops at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of one token and of its likeliest alternatives, natural logarithm."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
