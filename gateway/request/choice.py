"""One answer of a request: what its stream says, in order, on its way to where the answer goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from headwater.proto import common_pb2, engine_pb2, output_processor_pb2
from headwater.proto.output_processor_pb2 import RowParts
from headwater.services.runtime import errors

from ..stages.output_session import OutputSession, Scores
from ..tenancy.grant import LEASE_TOKENS
from .stream_failure import BROKEN, Cause, StreamLost, error_of

if TYPE_CHECKING:
    from .generation import Generation

CREDIT_BATCH = 256
"""Tokens that are taken before their credit goes back."""
UNHEARD_TOKENS = 8
"""That an engine may have computed when it died: who stops within so many again stopped at the same place."""
_NEVER = sys.maxsize
_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    common_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
}


class Sink(Protocol):
    """Where an answer goes. Neither call may wait."""

    def piece(self, choice: Choice, text: str, token_ids: list[int], logprobs: Scores, parts: RowParts | None) -> bool:
        """Takes more of a choice: its content, and what there is beside it.

        False: it is kept and `choice.taken` follows, which holds the engine back.
        """
        ...

    def ended(self, choice: Choice) -> None:
        """The choice has its `finish_reason`."""
        ...


class Choice:
    """One answer of a request: receives from the output session, passes on to the sink."""

    def __init__(self, generation: Generation, number: int, sink: Sink) -> None:
        self.generation, self.number, self.sink = generation, number, sink
        self.index = generation.job.first_index + number
        self.output_ids: list[int] = []
        self._has_untold_ids = False
        """What was found before its stream began is told with its text."""
        self.num_output_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.work: engine_pb2.Work | None = None
        """What the engine did for it, once it has said so."""
        self._observe = generation.line.metrics.of(generation.job.model).between_tokens
        self.session: OutputSession | None = None
        self._stream_id = 0
        self._last_time = self._opened_at = 0.0
        self._last_text, self._last_offset = "", 0
        self._last_parts: RowParts | None = None
        self.num_reasoning_tokens = 0
        self._sum_logprob = 0.0
        self.vector: list[float] = []
        """Of a prompt that is embedded."""
        self._num_taken = 0
        self._doubted_to = _NEVER
        """Output tokens; of an answer that an engine may have died of."""
        self.credit_left = 0
        """Tokens that may still come."""
        self.is_held_back = False
        """What its client has taken is not known: no credit goes back."""
        self.ended_at = 0
        """Seconds since 1970; of a request that can be resumed."""

    @property
    def mean_logprob(self) -> float:
        """A token's, of those that came with theirs."""
        return self._sum_logprob / max(len(self.output_ids), 1)

    def doubt(self) -> None:
        """An engine died while it was here."""
        self._doubted_to = len(self.output_ids) + UNHEARD_TOKENS

    @property
    def is_past_doubt(self) -> bool:
        return self._doubted_to == _NEVER

    @property
    def delivered_bytes(self) -> int:
        """UTF-8 bytes of text so far, content or not; a resume starts there."""
        last = len(self._last_text.encode()) if self._last_parts is None else self._last_parts.num_bytes
        return self._last_offset + last

    def opened(self, session: OutputSession, stream_id: int) -> None:
        self.session, self._stream_id = session, stream_id
        self._opened_at = time.perf_counter()

    @property
    def heard_at(self) -> float:
        """When its stream said something last, on `time.perf_counter`, or began."""
        return max(self._last_time, self._opened_at)

    def attached(self, granted: int) -> None:
        """It is told again from its start; so many tokens were allowed it, of which its first credit has no return."""
        self.credit_left = granted
        self._num_taken = min(0, LEASE_TOKENS - granted)

    def receive(
        self,
        first: int,
        token_ids: list[int],
        text: str,
        offset: int,
        now: float,
        logprobs: Scores,
        parts: RowParts | None,
    ) -> None:
        """The token path: everything here runs once an engine step and stream."""
        told_ids = token_ids
        if self._has_untold_ids:
            told_ids = [*self._known_ids(first), *token_ids]
        if first != len(self.output_ids):
            fault = f"tokens are missing: expected {len(self.output_ids)}, got {first}"
            self.generation.broke(StreamLost(fault, Cause.FAULT))
            return
        self.output_ids += token_ids
        if logprobs:
            self._sum_logprob += sum(token.chosen.logprob for token in logprobs)
        self._last_text, self._last_offset, self._last_parts = text, offset, parts
        if self._last_time:
            self._observe(now - self._last_time)
        else:
            self.generation.first_token(now)
        self._last_time = now
        if len(self.output_ids) > self._doubted_to:
            self._doubted_to = _NEVER
            self.generation.carriage.got_further()
        self.generation.grant.received(self, len(token_ids))
        if self.sink.piece(self, text, told_ids, logprobs, parts):
            self.taken(len(token_ids))

    def resume(self, token_ids: Sequence[int]) -> None:
        """Tokens that are known before its stream begins; their text comes with it, and may end before they do."""
        self.output_ids, self._has_untold_ids = list(token_ids), True

    def _known_ids(self, num_tokens: int) -> list[int]:
        """Of the tokens that were known, those that the text has: a stop string ends it."""
        self._has_untold_ids = False
        del self.output_ids[num_tokens:]
        return list(self.output_ids)

    def taken(self, num_tokens: int) -> None:
        """The client's side has room again; credit goes back in batches."""
        self._num_taken += num_tokens
        # Where limits gave it little to begin with, more is asked for sooner.
        is_batch = self._num_taken >= min(CREDIT_BATCH, self.generation.grant.first_credit)
        if is_batch and self.session is not None and not self.is_held_back:
            taken, self._num_taken = self._num_taken, 0
            self.generation.grant.taken(self, taken)

    def give(self, num_tokens: int) -> None:
        """Room for so many more."""
        self.credit_left += num_tokens
        if self.session is not None:
            self.session.credit(self._stream_id, num_tokens)

    @property
    def num_unleased(self) -> int:
        """Tokens of the longest answer for which it has no credit yet."""
        return self.generation.prepared.sampling.max_tokens - len(self.output_ids) - max(0, self.credit_left)

    def started(self, start: engine_pb2.Start) -> None:
        self.generation.started(start)

    def prompt_scored(self, part: output_processor_pb2.OutputPromptLogprobs) -> None:
        self.generation.prompt_logprobs.extend(part.tokens)
        self.generation.is_scored |= part.last

    def embedded(self, embedding: common_pb2.Embedding) -> None:
        self.vector = embedding.values[:]

    def finished(self, finish: output_processor_pb2.OutputFinish) -> None:
        self.session = None
        self.ended_at = finish.ended_at
        self.work = finish.work if finish.HasField("work") else None
        if finish.reason in BROKEN:
            self.generation.broke(error_of(finish))
        else:
            if self._has_untold_ids:
                self.sink.piece(self, "", self._known_ids(finish.num_output_tokens), (), None)
            stop = finish.WhichOneof("stop_reason")
            stop_reason = getattr(finish, stop) if stop is not None else None
            self.num_reasoning_tokens = finish.num_reasoning_tokens
            self.end(_REASONS[finish.reason], stop_reason, finish.num_output_tokens)

    def end(self, reason: str, stop_reason: str | int | None, num_output_tokens: int) -> None:
        self.finish_reason, self.stop_reason, self.num_output_tokens = reason, stop_reason, num_output_tokens
        self.sink.ended(self)
        self.generation.choice_ended(self)

    def lost(self, error: errors.HeadwaterError) -> None:
        self.session = None
        self.generation.broke(StreamLost(error.message, Cause.OUTPUT_PROCESSOR_GONE))

    def cancel(self, reason: str) -> None:
        """Ends its stream, unless it ended by itself."""
        if self.session is not None:
            self.session.cancel(self._stream_id, reason)
            self.session = None

    def detach(self) -> int | None:
        """Leaves its stream to whoever comes for it: its id, unless it has ended."""
        stream_id = self._stream_id if self.session is not None else None
        self.session = None
        return stream_id


class ScoredChoice(Choice):
    """The choice of a request for the prompt's log probabilities alone: its one token is not answered."""

    def receive(
        self,
        first: int,
        token_ids: list[int],
        text: str,
        offset: int,
        now: float,
        logprobs: Scores,
        parts: RowParts | None,
    ) -> None:
        self.generation.first_token(now)

    def end(self, reason: str, stop_reason: str | int | None, num_output_tokens: int) -> None:
        super().end("length", None, 0)
