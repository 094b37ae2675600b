"""One prompt of a request and its choices: the request, the answer so far, and what another attempt
needs.

The same under REST and gRPC. Knows nothing about the cluster that computes it, nor about where its
answer goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime import errors
from headwater.services.runtime.served_model import ServedModel

from ..adapters.names import Target
from ..router.decision import Decision
from ..stages.stream_context import Found
from ..tenancy.grant import LEASE_TOKENS, Grant
from .choice import Choice
from .ended_prompt import EndedPrompt
from .generation_request import GenerationRequest
from .prepared_prompt import PreparedPrompt
from .prompt_turns import Part
from .timeline import EngineStart, Timeline, work_fields

MAX_EXPLAINED_CHOICES = 128


def not_asleep() -> float:
    return 0.0


@dataclass(slots=True, eq=False)
class Generation:
    """One prompt and its choices."""

    request: GenerationRequest
    found: Found | None = None
    """State that its output processor keeps; set where another gateway or an earlier connection
    began it."""
    prompt: PreparedPrompt = field(default_factory=PreparedPrompt)
    prepared: processor_pb2.PrepareReply = field(default_factory=processor_pb2.PrepareReply)
    """Reply of the processor, which `prompt` has too. A field, as the next two: they are read some
    45 times a request, and properties cost more."""
    num_prompt_tokens: int = 0
    is_answered: bool = False
    """Whether its choices are answered with tokens."""
    choices: list[Choice] = field(default_factory=list)
    attempt: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """Number of cached tokens that came from beyond the device of their replica, by tier."""
    decision: Decision | None = None
    grant: Grant = field(init=False)
    """Right to use tokens. Set before it runs."""
    model: ServedModel = field(init=False)
    """The model as it was when the prompt was prepared. Later attempts do not look it up again."""
    target: Target = field(init=False)
    """Model and adapter of all attempts, once the prompt is prepared."""
    namespace: bytes = b""
    """Root of the prompt's block hashes."""
    front: tuple[bytes, int] = b"", 0
    """Namespace and number of the prompt's leading blocks that several tenants share; 0: none."""
    timeline: Timeline = field(default_factory=Timeline)
    task: asyncio.Task[Any] | None = None
    """Task that runs it."""
    cancelled_by: errors.HeadwaterError | None = None
    wait_seconds: Callable[[], float] = not_asleep
    """Estimated seconds until its model is awake; 0: the model is awake."""

    def __post_init__(self) -> None:
        self.target = Target(self.request.model)

    def take(self, prepared: processor_pb2.PrepareReply) -> None:
        """Stores the reply of the processor."""
        self.prepared = self.prompt.prepared = prepared
        self.num_prompt_tokens = len(prepared.prompt_ids)
        self.is_answered = bool(prepared.sampling.max_tokens) and not self.request.pooling

    @property
    def prompt_logprobs(self) -> list[common_pb2.TokenLogprob]:
        return self.prompt.logprobs

    @property
    def is_computed(self) -> bool:
        """Whether it needs a replica. False for a resumed one, which runs already."""
        sampling = self.prepared.sampling
        return self.found is None and (
            self.is_answered or bool(sampling.HasField("prompt_logprobs") or self.request.pooling)
        )

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far. For a choice that has ended, its engine's count."""
        return _num_output_tokens(self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens of the choices that have ended."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def unfinished(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finish_reason is None]

    @property
    def has_begun(self) -> bool:
        """Whether some of the answer exists, and may have gone to the client."""
        return any(choice.output_ids for choice in self.choices)

    @property
    def may_be_handed_over(self) -> bool:
        """Whether another replica may go on with it after its first token."""
        sampling = self.prepared.sampling
        is_plain = self.is_answered and sampling.max_tokens > 1 and len(self.choices) == 1
        return is_plain and not (sampling.use_beam_search or sampling.HasField("prompt_logprobs"))

    @property
    def answered(self) -> list[Choice]:
        """Choices that the client gets. If more choices were computed than requested, these are the
        ones with the highest mean log probability."""
        num_wanted = self.prepared.sampling.n
        if len(self.choices) <= num_wanted:
            return self.choices
        return sorted(self.choices, key=lambda choice: choice.mean_logprob, reverse=True)[
            :num_wanted
        ]

    @property
    def is_together(self) -> bool:
        """Whether its choices begin together: beams are compared at each step, and a client that
        resumes a stream finds all choices in one place."""
        return self.prepared.sampling.use_beam_search or self.request.context is not None

    @property
    def num_seats(self) -> int:
        """Number of seats that all its choices take."""
        sampling = self.prepared.sampling
        return max(sampling.n, sampling.best_of) if sampling.use_beam_search else len(self.choices)

    @property
    def num_tokens_at_first(self) -> int:
        """Number of output tokens that are reserved at the start. Beams reserve all that they may
        need, since they are not followed one by one."""
        sampling = self.prepared.sampling
        each = (
            sampling.max_tokens
            if sampling.use_beam_search
            else min(sampling.max_tokens, LEASE_TOKENS)
        )
        return each * len(self.choices) if self.is_answered else 0

    def granted(self, grant: Grant) -> None:
        """Sets the grant that its choices draw on."""
        self.grant = grant
        for choice in self.choices:
            choice.grant = grant

    def expected(self, choices: Sequence[Choice], has_prompt: bool) -> Part:
        """Number of tokens that `choices` will probably be given."""
        if self.found is not None:
            return Part(uncached=0, output=self.found.num_outstanding)
        output = self.prepared.sampling.max_tokens * len(choices) if self.is_answered else 0
        return Part(uncached=self.num_prompt_tokens * has_prompt, output=output)

    def spent(self, choices: Sequence[Choice], has_prompt: bool) -> Part:
        """Number of tokens that `choices` were given. The tenant does not pay again for what was
        delivered before a resume."""
        if self.found is not None:
            return Part(
                uncached=0, output=max(0, self.num_output_tokens - sum(self.found.num_tokens))
            )
        prompt = self.num_prompt_tokens if self.attempt and has_prompt else 0
        cached = min(prompt, self.cached_tokens)
        return Part(uncached=prompt - cached, cached=cached, output=_num_output_tokens(choices))

    def cancel(self, error: errors.HeadwaterError) -> None:
        """Ends it from outside: its run raises the error, also if it has not started."""
        self.cancelled_by = error
        if self.task is not None and not self.task.done():
            self.task.cancel()

    def receipt(self) -> dict[str, Any]:
        """Receipt as plain data for the client: which replica served the prompt and why, and how
        long that took."""
        timeline = self.timeline
        start = (timeline.attempts[-1].start if timeline.attempts else None) or EngineStart()
        return {
            "request_id": self.request.caller.request_id,
            "attempts": self.attempt,
            "exact": timeline.is_exact,
            "adapter": self.target.adapter.hex() or None,
            "decision": self.decision.receipt if self.decision is not None else None,
            "cached_tokens": self.cached_tokens,
            "cached_by_tier": self.cached_by_tier,
            "queue_seconds": timeline.queue_seconds,
            "engine_queue_seconds": start.queue_seconds,
            "prefill_seconds": start.prefill_seconds,
            "ttft_seconds": timeline.ttft,
            "engine": work_fields(choice.work for choice in self.choices),
        }

    def to_ended(self) -> EndedPrompt:
        """The prompt as a gateway remembers it, with the figures that it has now."""
        return EndedPrompt(
            timeline=self.timeline,
            num_prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            cached_by_tier=self.cached_by_tier,
            num_output_tokens=self.num_output_tokens,
            adapter=self.target.adapter,
            choices=tuple(map(_explained_choice, self.choices[:MAX_EXPLAINED_CHOICES])),
        )


def _explained_choice(choice: Choice) -> dict[str, Any]:
    """Plain data of a choice. `engine` is missing for a choice that a stop string ended: its engine
    does not report the end."""
    fields: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
    if (work := work_fields([choice.work])) is not None:
        fields["engine"] = work
    return fields


def _num_output_tokens(choices: Sequence[Choice]) -> int:
    return sum(
        each.num_output_tokens if each.finish_reason else len(each.output_ids) for each in choices
    )
