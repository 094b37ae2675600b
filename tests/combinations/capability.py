"""What a capability declares about itself, and what an answer tells about those that took place in
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Fields = Mapping[str, Any]
"""Fields of a chat request, as a client sends them."""


class Promise(Enum):
    """What a capability promises about the tokens of an answer."""

    SAME = "same tokens and log probabilities as without it"
    NEAR = "same tokens as without it, log probabilities but for rounding"
    CUT = "tokens as without it, up to the end that it sets"
    OWN = "tokens of its own, which nothing else changes"


class Move(Enum):
    """What happens around a request in order that a capability takes place."""

    REPEAT = "the same request was answered before"
    WARM = "a prompt that begins as this one was answered before; with state layers two"
    FLOOD = "other prompts took the device's blocks since"
    CROWD = "a longer answer of a higher rank wants the same blocks"
    COMPANY = "a longer plain answer runs beside it"
    LOSS = "the replica is lost in the middle of the answer"
    SLEEP = "the engine sleeps and wakes in the middle of the answer"
    LENT = "another engine, which lends its blocks, has computed the beginning of the prompt"
    HAND_OVER = (
        "an engine that computes prompts has the prompt, another one goes on behind its first token"
    )


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a request was told, and what its engine and gateway say about how. Counts that a world
    cannot know are 0."""

    token_ids: list[int]
    text: str = ""
    others: list[list[int]] = field(default_factory=list)
    """Token ids of the choices behind the first."""
    logprobs: list[tuple[float, ...]] = field(default_factory=list)
    """A row a token: of the token, then of its alternatives."""
    finish_reason: str = ""
    stop_reason: object = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments of tool calls."""
    num_prompt_tokens: int = 0
    num_prefill_steps: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_in: int = 0
    num_copied_blocks: int = 0
    """Partly filled blocks that were copied for sequences that begin alike."""
    num_from_disk: int = 0
    """Of the cached tokens."""
    num_pulled_tokens: int = 0
    """Tokens whose blocks came from another engine. They are not among the cached ones."""
    num_hand_overs: int = 0
    """Times that the request went from the engine of its prompt to another one, as planned."""
    num_tokens_before_loss: int = 0
    """Tokens that a replica which was lost had computed."""
    num_replicas: int = 1
    num_draft_tokens: int = 0
    """Drafted tokens that were verified."""
    num_accepted_tokens: int = 0
    """Those of them that stand."""
    num_sleeps: int = 0
    """Sleeps of the engines since the request came."""
    num_searches: int = 0
    """Requests that the engines computed for this one."""
    num_ranks: int = 0
    """Processes that computed it; 0 of an engine without ranks."""
    kv_format: str = ""
    weights: str = ""
    """Kind of the weights in the folder that the engine serves."""
    num_experts: int = 0
    """Of a layer of the model in that folder; 0: it has none."""
    adapter: str = ""
    """Hash of the adapter that the request had; empty: none."""
    num_state_layers: int = 0
    """Layers of that model that keep a state."""
    num_window_layers: int = 0
    """Layers of that model that see a window."""
    latent_rank: int = 0
    """Numbers that its keys and values are made of; 0: it caches keys and values."""
    numerics: str = ""
    """What the engine was told of its sums; one that cannot make them so does not start."""
    vector: tuple[float, ...] = ()
    """Answer of an encoder, which has no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The pair, or the capability on a device, is refused: by the named field, with these words."""

    field: str
    says: str
    is_on_gpu: bool = False
    """Other platforms serve it."""
    is_on_cpu: bool = False
    """Likewise."""

    @property
    def promise(self) -> str:
        return f"refused: `{self.field}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """The capability does not apply to a request that has the other one: its tokens are those of
    the other alone."""

    because: str
    is_on_gpu: bool = False
    """It applies elsewhere."""

    @property
    def promise(self) -> str:
        return f"as without it: {self.because}"


Beside = Refused | Aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A row and a column of the table."""

    name: str
    promise: Promise
    promise_where_rounded: Promise | None = None
    """Where something else is promised since numbers are rounded on their way: on GPUs to bfloat16,
    and of packed integers on CPUs, whose activations are rounded to 8 bits."""
    took_place: Callable[[Answer], bool]
    """Whether an answer shows that the capability was at work in it."""
    options: Fields = field(default_factory=dict)
    """How it changes the engine: fields of `ExecutorOptions`."""
    weights: str = ""
    """Kind of the model's weights; empty: as they are. Of two that meet, the first."""
    model: Fields = field(default_factory=dict)
    """How it changes the model: fields of its `config.json`."""
    base: Capability | None = None
    """What stands in its place where it is left out: its model without it. Other capabilities'
    models go before its own."""
    stands_for: str = ""
    """Name of the capability whose base it is; empty: it is a row of the table."""
    asks: Fields = field(default_factory=dict)
    """How it changes the request."""
    asks_after: Callable[[Answer], Fields] | None = None
    """As `asks`, where that depends on the answer without it."""
    needs: Fields = field(default_factory=dict)
    """What the request has beside, with it and without it."""
    moves: frozenset[Move] = frozenset()
    is_above_engine: bool = False
    """It is made by gateway, processor and output processor: its cells run through all stages."""
    may_coincide: bool = False
    """Its own tokens may happen to be those without it: few draws of a small model see a
    rounding."""
    is_simulated: bool = True
    """The simulated executor does it."""
    is_probed: bool = False
    """Where it would not pay it is tried once in many steps: a request is asked until it took
    place."""
    roles: tuple[str, ...] = ("both",)
    """Roles of the engines that `options` change, through all stages: one engine for each."""
    needs_slow_prompts: bool = False
    """Through all stages it takes a model whose prompts take longer than the random one's: the
    simulated."""
    refused_on_cpu: Refused | None = None
    """Where a CPU does not serve it: its cells run on the simulated executor if they can, else they
    are this."""
    refused_on_gpu: Refused | None = None
    """Where a GPU does not serve it: its cells are this."""
    beside: Mapping[str, Beside] = field(default_factory=dict)
    """By name of another capability: what is promised in place of `promise`."""
    settings: frozenset[str] = frozenset()
    """Fields of `ExecutorOptions` that belong to it, besides those of `options`."""
    sampling: frozenset[str] = frozenset()
    """Fields of the public sampling contract that belong to it."""

    def promise_with(self, *, rounding: bool) -> Promise:
        return (
            self.promise_where_rounded
            if rounding and self.promise_where_rounded is not None
            else self.promise
        )

    def aside(self, others: Iterable[Capability]) -> Aside | None:
        """Why it does not apply to a request that has these too, if it does not."""
        for other in others:
            if isinstance(found := self.beside.get(other.stands_for or other.name), Aside):
                return found
        return None
