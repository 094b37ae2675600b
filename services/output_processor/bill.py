"""What a request has used so far, as its usage record would say it. Counts; knows nothing about who writes that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.proto.output_processor_pb2 import Open
from headwater.services.gateway_identity import NOBODY
from headwater.services.usage_log import LEFT, UsageRecord

if TYPE_CHECKING:
    from headwater.services.output_processor.stream import OutputStream


@dataclass(slots=True)
class _Part:
    """One prompt of the request, in its latest attempt."""

    attempt: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """That an earlier attempt found."""
    num_before: int
    """Tokens of choices that ended in earlier attempts."""
    first: OutputStream
    streams: list[tuple[OutputStream, int]] = field(default_factory=list)
    """That are charged, each with the number of its tokens from earlier attempts."""

    @property
    def cached_tokens(self) -> int:
        # The choices share the prompt, and what counts is what was found first.
        return self.num_cached_tokens or self.first.cached_tokens

    @property
    def output_tokens(self) -> int:
        return self.num_before + sum(max(before, stream.num_tokens) for stream, before in self.streams)


class Bill:
    """Of one request and one gateway; a next gateway's has an id of its own, unless the one before charges nothing."""

    def __init__(self, record_id: str, tenant: str, model: str, key_id: str) -> None:
        self.record_id, self.tenant, self.model, self.key_id = record_id, tenant, model, key_id
        self.holder = NOBODY
        """Who shall write the record; nobody: whoever goes on with the request, if somebody does."""
        self.charged = (0, 0)
        """Tokens of prompts, and of answers, that gateways before charge."""
        self._told: tuple[int, int] | None = None
        """As above, that the gateway charges, where that is fixed."""
        self._parts: dict[int, _Part] = {}
        self.gateway = ""
        """The name of whoever carried the request last."""
        self._began = time.time()

    def add(self, opening: Open, streams: Sequence[OutputStream]) -> None:
        """Choices of one of its prompts; a later attempt takes the place of earlier ones."""
        add, charge = opening.add, opening.charge
        self.charged = (charge.charged_prompt_tokens, charge.charged_output_tokens)
        part = self._parts.get(add.prompt_index)
        if part is None or part.attempt < add.attempt:
            part = self._parts[add.prompt_index] = _Part(
                attempt=add.attempt,
                num_prompt_tokens=charge.prompt_tokens,
                num_cached_tokens=charge.cached_tokens,
                num_before=charge.output_tokens,
                first=streams[0],
            )
        if not charge.prompt_alone:
            part.streams += [(stream, add.num_output_tokens) for stream in streams]

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Its gateway charges so much and no more, whatever is still computed."""
        self._told = (prompt_tokens, output_tokens)

    def next(self, record_id: str, charged: tuple[int, int]) -> Bill:
        """Of the gateway that goes on with the request."""
        bill = Bill(record_id, self.tenant, self.model, self.key_id)
        bill.charged, bill._parts = charged, self._parts
        return bill

    def record(self) -> UsageRecord:
        """As of now."""
        now, parts = time.time(), self._parts.values()
        used = sum(part.num_prompt_tokens for part in parts), sum(part.output_tokens for part in parts)
        prompt_tokens, output_tokens = self._told or used
        prompt_tokens = max(0, prompt_tokens - self.charged[0])
        return UsageRecord(
            request_id=self.record_id,
            tenant=self.tenant,
            key_id=self.key_id,
            model=self.model,
            at=round(now, 3),
            prompts=len(parts) if prompt_tokens else 0,
            prompt_tokens=prompt_tokens,
            cached_tokens=sum(part.cached_tokens for part in parts) if prompt_tokens else 0,
            output_tokens=max(0, output_tokens - self.charged[1]),
            seconds=round(now - self._began, 3),
            outcome=LEFT,
            gateway=self.gateway,
        )
