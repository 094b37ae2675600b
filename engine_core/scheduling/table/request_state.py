"""State of a live request in the engine, apart from the columns of the request table."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ...config import EngineConfig
from ...executor import NO_ADAPTER, Int32Array
from ...first_come import Arrival
from ...kv.block_source import Loader
from ...kv.prefix_cache import HashChain
from ...kv.prefix_hash import Front
from ...kv.value.turn import Turn
from ...request import FinishReason, NewRequest, Speculation
from ...sampling_params import SamplingParams
from ...step_output import Finished, Work

Rank = tuple[int, float, float]
"""Tier, the policy's key, and the order among equals: the number of the arrival or, of a request
that came with a part of its answer, a time."""
BEGUN_ELSEWHERE = -math.inf
"""Key, under each policy, of a request that came with a part of its answer: a client has read it
and waits for the rest."""
NO_ROW = -1


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """One choice from add to finish. `token_ids`, `credit` and `num_computed` are authoritative
    only without a row, or, for `num_computed`, until the prompt is computed; the table's columns
    are otherwise."""

    key: int
    rank: Rank
    """Smaller runs first and is preempted last."""
    sampling: SamplingParams
    choice_index: int
    has_grammar: bool
    num_prompt_tokens: int
    max_len: int
    """Tokens, prompt included, at which the answer is full."""
    token_ids: Int32Array
    """Prompt and outputs so far."""
    chain: HashChain
    credit: int
    added_at: float
    tier: int = 0
    virtual_time: float = 0.0
    arrival: int = 0
    """Number of its arrival."""
    arrived_at: float = 0.0
    """When it came to the cluster, on the clock of `added_at`."""
    num_expected_tokens: int = 0
    """Tokens that its answer is predicted to have."""
    first_token_by: float = math.inf
    """When its first token is due; infinite without a goal."""
    token_seconds: float = 0.0
    """Goal for the time between two tokens; 0: there is none."""
    tenant: str = ""
    """Name of its tenant."""
    weight: float = 1.0
    risen_at: float = 0.0
    """Time at which it last moved up a tier, plus the time for which it has held a row since."""
    seated_at: float = 0.0
    """When it last took a row."""
    row: int = NO_ROW
    num_computed: int = 0
    num_cached_tokens: int = 0
    """Number of cached tokens of the prompt at first admission."""
    num_loaded_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that block sources loaded for it since it last held a row, by tier."""
    load_began: float = 0.0
    """When it last began to wait for a block source."""
    load_seconds: float = 0.0
    """How long it has waited for block sources since it last held a row."""
    num_cached_by_tier: dict[str, int] = field(default_factory=dict)
    """Part of `num_cached_tokens` that another tier than the device held, by tier."""
    num_uncached_tokens: int = 0
    """Still to compute, as far as is known while waiting."""
    num_first_uncached: int = 0
    """Prompt tokens to compute when it first waited."""
    num_forgotten: int = 0
    """Tokens computed for it before it last began at the first level; see `Facts.num_level`."""
    waits_since: float = 0.0
    """When it last came into the queue, or to the first level."""
    blocked_at: float | None = None
    """Time at which it first found too few blocks since it last held a row."""
    in_order_of_arrival: Arrival | None = None
    """Place of the request in the order of arrival, until it first has a row."""
    fcfs_queue_seconds: float = 0.0
    """How long it would have waited in order of arrival."""
    num_scored_tokens: int = 0
    """Leading prompt positions whose log probabilities are out, if they are wanted."""
    scheduled_at: float | None = None
    has_started: bool = False
    has_finished: bool = False
    is_unwanted: bool = False
    """Whether its client has left, so that no prompt continues its answer."""
    has_yielded: bool = False
    """Whether it yielded its seat to another tenant; no other request waits for its return."""
    failed_sources: tuple[Loader, ...] = ()
    """Block sources that failed to load what it waited for since it last held a row; they are not
    asked again."""
    num_preemptions: int = 0
    num_steps: int = 0
    """Number of steps planned while it held rows, up to its last release."""
    num_step_rows: int = 0
    """Requests in these steps, itself included."""
    speculation: Speculation = field(default_factory=Speculation)
    adapter: bytes = b""
    """See `NewRequest.adapter`."""
    adapter_slot: int = NO_ADAPTER
    """Slot of its adapter while it holds a row."""
    forks: bool = False
    """See `NewRequest.forks`."""
    num_draft_tokens: int = 0
    """Drafted tokens that were verified, as of when it last gave up a row."""
    num_accepted_tokens: int = 0

    @classmethod
    def enter(
        cls, new: NewRequest, config: EngineConfig, *, arrival: int, now: float
    ) -> RequestState:
        arrived_at = now - new.age_seconds
        num_max_tokens = min(new.sampling.max_tokens, config.max_model_len - len(new.prompt_ids))
        return cls(
            key=new.key,
            rank=(new.tier, BEGUN_ELSEWHERE if new.output_ids else new.virtual_time, arrival),
            tier=new.tier,
            virtual_time=new.virtual_time,
            arrival=arrival,
            arrived_at=arrived_at,
            num_expected_tokens=min(new.num_expected_tokens or num_max_tokens, num_max_tokens),
            first_token_by=arrived_at + (new.first_token_seconds or math.inf),
            token_seconds=new.token_seconds,
            sampling=new.sampling,
            choice_index=new.choice_index,
            has_grammar=new.has_grammar,
            num_prompt_tokens=len(new.prompt_ids),
            max_len=min(len(new.prompt_ids) + new.sampling.max_tokens, config.max_model_len),
            token_ids=np.asarray(new.prompt_ids + new.output_ids, dtype=np.int32),
            chain=HashChain(new.namespace, new.tenant, front=_front_of(new), turn=turn_of(new)),
            credit=new.credit,
            added_at=now,
            tenant=new.tenant,
            weight=new.weight,
            speculation=new.speculation,
            adapter=new.adapter,
            forks=new.forks and config.enable_prefix_caching,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether the first part of its answer is known."""
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def min_tokens(self) -> int:
        """Outputs before which stop ids do not stop. An answer that matches its grammar has ended,
        however short."""
        return 0 if self.has_grammar else self.sampling.min_tokens

    def work(self, kv_bytes: dict[str, int]) -> Work:
        """Work for a request that has ended; `kv_bytes`: see `Work`."""
        mean = self.num_step_rows / self.num_steps if self.num_steps else 0.0
        return Work(
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            mean_batch=mean,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            kv_bytes=kv_bytes,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions remain to be scored; the last one predicts an output and is
        not."""
        return (
            self.sampling.num_prompt_logprobs is not None
            and self.num_scored_tokens < self.num_prompt_tokens - 1
        )

    @property
    def looks_at_all(self) -> bool:
        """Whether all prompt tokens have to be computed, since results for all of them are
        wanted."""
        return self.wants_prompt_logprobs or self.sampling.pooling in ("mean", "cls")

    def num_cacheable_blocks(self, block_size: int) -> int:
        """The most blocks that a prefix hit may serve: one token is always computed, as is what
        must be scored or pooled."""
        if self.sampling.pooling in ("mean", "cls"):
            return 0
        computable_from = (
            self.num_scored_tokens if self.wants_prompt_logprobs else self.num_tokens - 1
        )
        return min(len(self.chain.hashes), computable_from // block_size)


def finished_at_once(
    new: NewRequest, request: RequestState, config: EngineConfig
) -> Finished | None:
    """The end of a request that has nothing to compute, or that can never fit; None: it is
    served."""
    reason = None
    error = ""
    stop_token_id = None
    num_prompt = len(new.prompt_ids)
    outputs = new.output_ids
    sampling = new.sampling
    if not new.prompt_ids:
        reason = FinishReason.ERROR
        error = "the prompt has no tokens"
    elif not (config.has_cache or sampling.pooling):
        reason = FinishReason.ERROR
        error = "the model embeds texts and answers none"
    elif num_prompt + min(sampling.max_tokens, 1) > config.max_model_len:
        reason = FinishReason.ERROR
        error = (
            f"a prompt of {num_prompt} tokens leaves no room for an answer within "
            f"{config.max_model_len}"
        )
    elif outputs and outputs[-1] in sampling.stop_token_ids and len(outputs) > request.min_tokens:
        reason = FinishReason.STOP
        stop_token_id = outputs[-1]
    elif outputs and request.num_tokens >= request.max_len:
        reason = FinishReason.LENGTH
    if reason is None:
        return None
    return Finished(
        key=new.key,
        reason=reason,
        num_output_tokens=len(outputs),
        stop_token_id=stop_token_id,
        error=error,
    )


def turn_of(new: NewRequest) -> Turn:
    """The turn that a request is, for the value of its cached blocks."""
    return Turn(
        tenant=new.tenant,
        weight=new.weight,
        kind=new.turn_kind,
        session=new.session,
        priority=new.cache_priority,
        keep_seconds=new.keep_seconds,
        end_token_ids=new.end_token_ids,
    )


def _front_of(new: NewRequest) -> Front | None:
    """Leading blocks of a request that other tenants share."""
    return Front(new.front_namespace, new.num_front_blocks) if new.num_front_blocks else None
