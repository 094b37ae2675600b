"""The usage record of one request as it reads so far. Counts; knows nothing about who writes the
record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headwater.proto.output_processor_pb2 import Open

from ..runtime.gateway_identity import NOBODY
from ..runtime.usage_log import LEFT, UsageRecord


class ChoiceUsage(Protocol):
    """Counts of one choice, read when the record is written."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of its answer so far."""

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of its prompt that the engine found cached."""


@dataclass(slots=True)
class _PromptUsage:
    """One prompt of the request, in its latest attempt."""

    attempt: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Number of cached tokens that an earlier attempt found."""
    num_ended_tokens: int
    """Number of output tokens of choices that ended in earlier attempts."""
    first: ChoiceUsage
    choices: list[tuple[ChoiceUsage, int]] = field(default_factory=list)
    """Choices that are charged, each with the number of its tokens from earlier attempts."""

    @property
    def cached_tokens(self) -> int:
        # The choices share the prompt, and the first finding counts.
        return self.num_cached_tokens or self.first.cached_tokens

    @property
    def output_tokens(self) -> int:
        return self.num_ended_tokens + sum(
            max(earlier, choice.num_tokens) for choice, earlier in self.choices
        )


class PendingRecord:
    """Usage record of one request at one gateway. The next gateway's record has an id of its own,
    unless this one charges nothing."""

    def __init__(self, record_id: str, tenant: str, model: str, key_id: str) -> None:
        self.record_id = record_id
        self.tenant = tenant
        self.model = model
        self.key_id = key_id
        self.holder = NOBODY
        """Gateway that writes the record; NOBODY while it waits for the next gateway of the
        request."""
        self.charged = (0, 0)
        """Numbers of prompt tokens and output tokens that earlier gateways charge."""
        self.gateway = ""
        """Name of the last gateway of the request."""
        self._settled: tuple[int, int] | None = None
        """Numbers of prompt tokens and output tokens up to the end of this gateway's share, once
        that is fixed."""
        self._prompts: dict[int, _PromptUsage] = {}
        self._started_at = time.time()

    def add(self, opening: Open, choices: Sequence[ChoiceUsage]) -> None:
        """Adds choices of one of the prompts; a later attempt takes the place of earlier ones."""
        add = opening.add
        charge = opening.charge
        self.charged = (charge.charged_prompt_tokens, charge.charged_output_tokens)
        prompt = self._prompts.get(add.prompt_index)
        if prompt is None or prompt.attempt < add.attempt:
            prompt = self._prompts[add.prompt_index] = _PromptUsage(
                attempt=add.attempt,
                num_prompt_tokens=charge.prompt_tokens,
                num_cached_tokens=charge.cached_tokens,
                num_ended_tokens=charge.output_tokens,
                first=choices[0],
            )
        if not charge.prompt_alone:
            prompt.choices += [(choice, add.num_output_tokens) for choice in choices]

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Fixes the gateway's charge, whatever is still computed."""
        self._settled = (prompt_tokens, output_tokens)

    def successor(self, record_id: str, charged: tuple[int, int]) -> PendingRecord:
        """Record of the gateway that goes on with the request."""
        record = PendingRecord(record_id, self.tenant, self.model, self.key_id)
        record.charged = charged
        record._prompts = self._prompts
        return record

    def to_record(self) -> UsageRecord:
        """The record as of now."""
        now = time.time()
        prompts = self._prompts.values()
        used = (
            sum(each.num_prompt_tokens for each in prompts),
            sum(each.output_tokens for each in prompts),
        )
        prompt_tokens, output_tokens = self._settled or used
        prompt_tokens = max(0, prompt_tokens - self.charged[0])
        return UsageRecord(
            request_id=self.record_id,
            tenant=self.tenant,
            key_id=self.key_id,
            model=self.model,
            at=round(now, 3),
            prompts=len(prompts) if prompt_tokens else 0,
            prompt_tokens=prompt_tokens,
            cached_tokens=sum(each.cached_tokens for each in prompts) if prompt_tokens else 0,
            output_tokens=max(0, output_tokens - self.charged[1]),
            seconds=round(now - self._started_at, 3),
            outcome=LEFT,
            gateway=self.gateway,
        )
