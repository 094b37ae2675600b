"""One answer of a prompt: its tokens so far, its credit, its end, and what a further attempt
needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from headwater.proto import engine_pb2
from headwater.proto.output_processor_pb2 import RowParts
from headwater.services.runtime import errors

from ..stages.output_session import OutputSession, Scores
from ..tenancy.grant import LEASE_TOKENS, Grant
from .prepared_prompt import PreparedPrompt

CREDIT_BATCH = 256
"""Number of tokens that a client takes before their credit goes back to the engine."""
UNSEEN_TOKENS = 8
"""Number of tokens that an engine may have computed when it died. An answer that stops within as
many again has stopped at the same place."""
NEVER = sys.maxsize


class Sink(Protocol):
    """The destination of an answer. Neither call may wait."""

    def piece(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: Scores,
        parts: RowParts | None,
    ) -> bool:
        """Takes a piece of a choice: content, log probabilities, calls.

        Returns False for a piece that is kept: `choice.taken` follows later, and the engine is held
        back until then.
        """
        ...

    def ended(self, choice: Choice) -> None:
        """Called when the choice has its `finish_reason`."""
        ...


class OpenStream(Protocol):
    """The open stream over which a choice's tokens come."""

    session: OutputSession
    stream_id: int

    def fail(self, error: errors.HeadwaterError) -> None:
        """Ends the attempt that the stream belongs to."""
        ...


class Choice:
    """One answer of a prompt."""

    grant: Grant
    """Set before its stream opens."""

    def __init__(self, number: int, index: int, prompt: PreparedPrompt) -> None:
        """`number` is the position among the choices of the prompt, `index` the position among all
        choices of the request."""
        self.number = number
        self.index = index
        self.prompt = prompt
        self.stream: OpenStream | None = None
        self.output_ids: list[int] = []
        self.has_unsent_ids = False
        """Whether `output_ids` were found before the stream began; the sink gets them with their
        text."""
        self.num_output_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.has_cut_call = False
        """Whether the last of its calls is not whole, once it has ended."""
        self.work: engine_pb2.Work | None = None
        """The engine's work on the choice, once the engine has reported it."""
        self.last_token_at = 0.0
        """Time of the last token on `time.perf_counter`; 0: no token has come."""
        self._last_text = ""
        self._last_offset = 0
        self._last_parts: RowParts | None = None
        self.num_reasoning_tokens = 0
        self._sum_logprob = 0.0
        self.vector: list[float] = []
        """The embedding of a prompt that is embedded."""
        self._num_taken = 0
        self.doubted_to = NEVER
        """Output tokens up to which an engine may have died of the answer; `NEVER`: none has."""
        self.credit_left = 0
        """Number of tokens that may still come."""
        self.is_held_back = False
        """Whether credit is withheld, because it is unknown how much the client has read."""
        self.ended_at = 0
        """Time of the end, seconds since 1970; set for a request that can be resumed."""

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of a token."""
        return self._sum_logprob / max(len(self.output_ids), 1)

    @property
    def delivered_bytes(self) -> int:
        """Number of UTF-8 bytes of text so far, content or not. A resume starts there."""
        last = (
            len(self._last_text.encode())
            if self._last_parts is None
            else self._last_parts.num_bytes
        )
        return self._last_offset + last

    def add(
        self, token_ids: list[int], text: str, offset: int, logprobs: Scores, parts: RowParts | None
    ) -> None:
        """Adds the tokens of a step."""
        self.output_ids += token_ids
        if logprobs:
            self._sum_logprob += sum(token.chosen.logprob for token in logprobs)
        self._last_text = text
        self._last_offset = offset
        self._last_parts = parts

    def doubt(self) -> None:
        """Notes that an engine died while it computed the choice."""
        self.doubted_to = len(self.output_ids) + UNSEEN_TOKENS

    @property
    def is_past_doubt(self) -> bool:
        return self.doubted_to == NEVER

    def attached(self, granted: int) -> None:
        """Prepares for a stream that repeats the tokens from the first one. `granted` tokens were
        allowed; the first credit among them has no return."""
        self.credit_left = granted
        self._num_taken = min(0, LEASE_TOKENS - granted)

    def resume(self, token_ids: Sequence[int]) -> None:
        """Sets tokens that are known before the stream begins. Their text comes with it, and may
        end before they do."""
        self.output_ids = list(token_ids)
        self.has_unsent_ids = True

    def known_ids(self, num_tokens: int) -> list[int]:
        """Known tokens that the delivered text covers: a stop string may have ended the text before
        the last tokens."""
        self.has_unsent_ids = False
        del self.output_ids[num_tokens:]
        return list(self.output_ids)

    def taken(self, num_tokens: int) -> None:
        """Notes that the client's side has room again; credit goes back in batches."""
        self._num_taken += num_tokens
        # A choice that was granted few tokens at its start asks for more sooner.
        is_batch = self._num_taken >= min(CREDIT_BATCH, self.grant.first_credit)
        if is_batch and self.stream is not None and not self.is_held_back:
            taken = self._num_taken
            self._num_taken = 0
            self.grant.taken(self, taken)

    def give(self, num_tokens: int) -> None:
        """Gives the engine credit for more tokens."""
        self.credit_left += num_tokens
        if self.stream is not None:
            self.stream.session.credit(self.stream.stream_id, num_tokens)

    @property
    def num_unleased(self) -> int:
        """Number of tokens of the longest possible answer that the choice has no credit for yet."""
        return (
            self.prompt.prepared.sampling.max_tokens
            - len(self.output_ids)
            - max(0, self.credit_left)
        )

    def refuse(self, error: errors.LimitExceeded) -> None:
        """Ends the attempt, unless the choice has ended."""
        if self.finish_reason is None and self.stream is not None:
            self.stream.fail(error)

    def end(
        self, reason: str, stop_reason: str | int | None = None, num_output_tokens: int = 0
    ) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.num_output_tokens = num_output_tokens

    def cancel(self, reason: str) -> None:
        """Ends the stream of the choice, unless it ended by itself."""
        if self.stream is not None:
            self.stream.session.cancel(self.stream.stream_id, reason)
            self.stream = None
