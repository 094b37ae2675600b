"""The output of a resumable request that gateways were sent, kept for its next reader for a bounded
time.

A log takes the output of the request's choices in place of a session's outbox, keeps it, passes it
on to the session that reads, and emits all of it again for the next one. Knows nothing about text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from headwater.proto.common_pb2 import FINISH_REASON_CANCELLED, Embedding, TokenLogprob
from headwater.proto.engine_pb2 import Start
from headwater.proto.output_processor_pb2 import (
    Attached,
    FoundStream,
    Open,
    OutputFinish,
    OutputPromptLogprobs,
    RowLogprobs,
    RowParts,
)

from ..runtime.gateway_identity import Gateway
from .frames import Outbox
from .pending_record import PendingRecord
from .pending_usage import PendingUsage
from .running_request import RunningChoice
from .transcript import Transcript, emit_finish, emit_start

HOLD_SECONDS = 15.0
"""Seconds for which an answer goes on while no session reads it."""
KEEP_SECONDS = 60.0
"""Seconds for which an answer that has ended can be read again."""
MAX_TOKENS = 32_768
"""Largest number of output tokens of a request, over its choices; a longer one cannot be
resumed."""
CONTEXT_BYTES = 128 * 1024
"""Number of bytes of context in one message."""


class Reader(Protocol):
    """The session that a log passes its output on to."""

    @property
    def outbox(self) -> Outbox: ...

    @property
    def gateway(self) -> Gateway: ...

    def on_log_taken(self, log: StreamLog) -> None:
        """Called when another session reads the log from now on; its choices are no longer this
        one's."""

    def on_log_dropped(self, log: StreamLog) -> None:
        """Called when the log is no longer kept; its choices go on for this session alone."""


class LogStore(Protocol):
    """Holder of all logs within a bound of memory."""

    def resize(self, log: StreamLog, num_bytes: int) -> None:
        """Notes that a log has so many bytes now."""

    def drop(self, log: StreamLog) -> None:
        """Drops a log whose time is over, or that is too long."""


class StreamLog:
    """Output of one request, which a reader receives or which is kept for the next reader until it
    expires. Choices are numbered by their index."""

    def __init__(
        self, store: LogStore, usage: PendingUsage, request_id: str, tenant: str, num_choices: int
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.num_choices = num_choices
        self.attempt = 0
        self.reader: Reader | None = None
        self.num_readers = 0
        """Number of readers, present or past, that charge a part of the output."""
        self.is_kept = True
        """Whether the log is kept; once it was dropped, no session can resume it."""
        self.stream_ids = [0] * num_choices
        """Stream ids of the reader, or of the last one."""
        self._store = store
        self._usage = usage
        self._context = b""
        """Context that a gateway needs to go on with the request."""
        self._transcript = Transcript(num_choices)
        self._cancelled: set[int] = set()
        self._choices: dict[int, RunningChoice] = {}
        """The latest attempt of each choice by index, ended or not."""
        self._num_prompt_tokens = 0
        self._record: PendingRecord | None = None
        """Usage record of the reader, or of the last one."""
        self._charged = (0, 0)
        """Numbers of tokens of the prompt, and of answers, that earlier readers charge."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_ended(self) -> bool:
        return all(self._transcript.ended)

    @property
    def is_wanted(self) -> bool:
        """Whether no choice was cancelled."""
        return not self._cancelled

    @property
    def open_ids(self) -> list[int]:
        """Stream ids, at the reader, of choices that have not ended."""
        return [
            each
            for each, ended in zip(self.stream_ids, self._transcript.ended, strict=True)
            if not ended
        ]

    @property
    def running(self) -> list[RunningChoice]:
        return [choice for choice in self._choices.values() if not choice.ended]

    def add_row(
        self,
        choice: int,
        first: int,
        token_ids: Sequence[int],
        text: str,
        offset: int,
        num_bytes: int,
    ) -> None:
        self._transcript.add_row(choice, first, token_ids, text, offset, num_bytes)
        self._account()
        if sum(self._transcript.num_tokens) > MAX_TOKENS:
            self._store.drop(self)
        if self.reader is not None:
            self.reader.outbox.add_row(
                self.stream_ids[choice], first, token_ids, text, offset, num_bytes
            )

    def add_logprobs(self, tokens: Iterable[TokenLogprob]) -> None:
        row = RowLogprobs(tokens=tokens)
        self._transcript.add_logprobs(row)
        self._account()
        if self.reader is not None:
            self.reader.outbox.add_logprobs(row.tokens)

    def add_parts(self, parts: RowParts) -> None:
        self._transcript.add_parts(parts)
        self._account()
        if self.reader is not None:
            self.reader.outbox.add_parts(parts)

    def add_start(self, start: Start) -> None:
        choice = start.stream_id
        self._transcript.add_start(choice, start)
        self._account()
        if self.reader is not None:
            emit_start(self.reader.outbox, self.stream_ids[choice], start)

    def add_finish(self, finish: OutputFinish) -> None:
        choice = finish.stream_id
        finish.ended_at = int(time.time())
        if finish.reason == FINISH_REASON_CANCELLED:
            self._cancelled.add(choice)
        self._transcript.add_finish(choice, finish)
        self._account()
        if self.reader is not None:
            emit_finish(self.reader.outbox, self.stream_ids[choice], finish)
        if self.has_ended and self.is_kept:
            self._drop_in(KEEP_SECONDS)

    def add_embedding(self, embedding: Embedding) -> None:
        raise AssertionError("a prompt that is embedded is no stream")

    def add_prompt_part(self, part: OutputPromptLogprobs) -> None:
        """Sends log probabilities of the prompt. They are not kept: a stream that asks for them
        cannot be resumed."""
        if self.reader is not None:
            part.stream_id = self.stream_ids[part.stream_id]
            self.reader.outbox.add_prompt_part(part)

    def begin(self, reader: Reader, opening: Open, context: bytes) -> None:
        """Begins to compute choices anew, from the output that `reader` has."""
        add = opening.add
        stream_ids = dict(
            zip(add.choice_indices or range(self.num_choices), add.stream_ids, strict=True)
        )
        is_new = reader is not self.reader
        if is_new:
            if self.reader is None and self._record is not None:
                self._usage.supersede(self._record)
            self._leave_reader()
        self._abandon(range(self.num_choices) if is_new else stream_ids, "superseded")
        if is_new:
            self.stream_ids = [0] * self.num_choices
            self.reader = reader
            self.num_readers = self.num_readers + 1
        self._stop_timer()
        self.attempt = max(self.attempt, add.attempt)
        self._num_prompt_tokens = add.num_prompt_tokens
        self._context = context or self._context
        for choice, stream_id in stream_ids.items():
            self.stream_ids[choice] = stream_id
            self._cancelled.discard(choice)
            self._transcript.cut(
                choice, add.num_output_tokens, next(iter(opening.delivered_bytes), 0)
            )
        self._account()

    def on_opened(self, choices: Iterable[RunningChoice], record: PendingRecord | None) -> None:
        """Notes that these choices compute the output from now on, and the record of their
        usage."""
        self._record = record
        self._choices.update({choice.index: choice for choice in choices})

    def attach(
        self, reader: Reader, stream_ids: Sequence[int], record_id: str
    ) -> dict[int, RunningChoice]:
        """Makes a session the reader, which charges the rest under `record_id`. Returns the running
        choices by the stream ids that they have there."""
        self._leave_reader()
        if not self.has_ended:
            self._stop_timer()
        self._succeed_record(reader, record_id)
        self.stream_ids = list(stream_ids)
        self.reader = reader
        self.num_readers = self.num_readers + 1
        return {stream_ids[i]: choice for i, choice in self._choices.items() if not choice.ended}

    def replay(self) -> None:
        """Emits to the reader all output so far."""
        assert self.reader is not None
        prompt_tokens, output_tokens = self._charged
        self.reader.outbox.add_attached(
            Attached(
                stream_ids=self.stream_ids,
                granted=self._granted(),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
            )
        )
        self._transcript.emit(self.reader.outbox, self.stream_ids)

    def detach(self, charged: tuple[int, int] | None) -> None:
        """Ends the reader, which has charged this many prompt tokens and answer tokens. None: the
        reader is lost, and the next one charges its share under the same record id, so that it
        counts once in any case."""
        self.reader = None
        if charged is not None:
            self._settle(charged)
        else:
            self.num_readers -= 1
            if self._record is not None:
                self._usage.release(self._record)
        for choice in self.running:
            choice.detach()
        if not self.has_ended:
            self._drop_in(HOLD_SECONDS)

    def found(self) -> Iterator[FoundStream]:
        """Messages that answer another gateway's search."""
        prompt_tokens, output_tokens = self._charged if self.reader is None else self._all_charged()
        yield FoundStream(
            context=self._context[:CONTEXT_BYTES],
            num_choices=self.num_choices,
            granted=self._granted(),
            num_tokens=self._transcript.num_tokens,
            ended=self.has_ended,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            num_readers=self.num_readers,
            attempt=self.attempt,
        )
        for start in range(CONTEXT_BYTES, len(self._context), CONTEXT_BYTES):
            yield FoundStream(context=self._context[start : start + CONTEXT_BYTES])

    def close(self) -> None:
        """Keeps nothing from now on; its choices go on for the reader, and end without one."""
        self.is_kept = False
        self._stop_timer()
        self._transcript.drop()
        self._context = b""
        if self.reader is not None:
            self.reader.on_log_dropped(self)
            return
        if self._record is not None:
            self._usage.write_released(self._record)
        self._abandon(range(self.num_choices), "nobody_came")

    def _leave_reader(self) -> None:
        """Makes the reader, if there is one, charge everything that it received."""
        if self.reader is not None:
            self._settle(self._all_charged())
            self.reader.on_log_taken(self)
            self.reader = None
            for choice in self.running:
                choice.detach()

    def _abandon(self, choices: Iterable[int], reason: str) -> None:
        for i in choices:
            if i in self._choices and not self._choices[i].ended:
                self._choices[i].abandon(reason)

    def _granted(self) -> list[int]:
        return [
            self._choices[i].credit if i in self._choices else 0 for i in range(self.num_choices)
        ]

    def _all_charged(self) -> tuple[int, int]:
        """Numbers of prompt and answer tokens that this reader and earlier ones have charged if it
        leaves now."""
        return self._num_prompt_tokens, sum(self._transcript.num_tokens)

    def _settle(self, charged: tuple[int, int]) -> None:
        self._charged = charged
        if self._record is not None:
            self._record.settle(*charged)

    def _succeed_record(self, reader: Reader, record_id: str) -> None:
        """Opens the reader's record, without the part that earlier readers charge."""
        if self._record is not None and record_id:
            self._usage.supersede(self._record)
            self._record = self._record.successor(record_id, self._charged)
            self._usage.assign(self._record, reader.gateway)

    def _account(self) -> None:
        """Reports the size of the log to the store."""
        if self.is_kept:
            self._store.resize(self, self._transcript.num_bytes + len(self._context))

    def _drop_in(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._store.drop, self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
