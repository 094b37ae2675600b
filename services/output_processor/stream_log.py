"""What gateways were told of a request that can be resumed, kept for whoever comes back: bounded in time.

It stands where an outbox does, remembers what is put in, passes it on to the session that reads, and says all of it
again to the next. Knows nothing about text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from headwater.proto.common_pb2 import FINISH_REASON_CANCELLED, Embedding, TokenLogprob
from headwater.proto.engine_pb2 import Start
from headwater.proto.output_processor_pb2 import (
    Attached,
    FoundStream,
    LetGo,
    Open,
    OutputFinish,
    OutputPromptLogprobs,
    RowLogprobs,
    RowParts,
)
from headwater.services.output_processor.log_entry import Begin, End, Entry, Row, is_within

if TYPE_CHECKING:
    from headwater.services.output_processor.bill import Bill
    from headwater.services.output_processor.session import GatewaySession, Place
    from headwater.services.output_processor.stream import OutputStream
    from headwater.services.output_processor.stream_logs import StreamLogs

HOLD_SECONDS = 15.0
"""That an answer goes on while nobody reads it."""
KEEP_SECONDS = 60.0
"""That an answer which has ended can be read again."""
MAX_TOKENS = 32_768
"""Of a request, over its choices; one that grows past them cannot be resumed any longer."""
CONTEXT_BYTES = 128 * 1024
"""In one message."""


class StreamLog:
    """One request. It has a reader, or it is held for the next one until its time is over."""

    def __init__(self, logs: StreamLogs, request_id: str, tenant: str, num_choices: int) -> None:
        self.request_id, self.tenant, self.num_choices = request_id, tenant, num_choices
        self.context = b""
        self.attempt = 0
        self.reader: GatewaySession | None = None
        self.stream_ids = [0] * num_choices
        """As the reader numbers its choices, or the last one did."""
        self.num_readers = 0
        """Who charged a part of it, or does."""
        self.num_bytes = 0
        self._logs = logs
        self._entries: list[Entry] = []
        self._num_tokens = [0] * num_choices
        self._ended = [False] * num_choices
        self._cancelled: set[int] = set()
        """Choices that were not wanted any longer."""
        self._streams: dict[int, OutputStream] = {}
        """By choice: those that run, or ran last."""
        self._choices: dict[int, int] = {}
        """By stream id."""
        self._held: dict[int, Place] = {}
        """Of choices that run while nobody reads."""
        self._num_prompt_tokens = 0
        self._bill: Bill | None = None
        """Of its reader, or of the last one."""
        self._charged = (0, 0)
        """Tokens of the prompt, and of answers, that earlier readers charge."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_ended(self) -> bool:
        return all(self._ended)

    @property
    def is_wanted(self) -> bool:
        return not self._cancelled

    # What an outbox takes.

    def add_row(
        self, stream_id: int, first: int, token_ids: Sequence[int], text: str, offset: int, num_bytes: int
    ) -> None:
        choice = self._choices[stream_id]
        self._num_tokens[choice] = first + len(token_ids)
        self._keep(Row(choice, first, token_ids, text, offset, num_bytes))
        if self.reader is not None:
            self.reader.outbox.add_row(stream_id, first, token_ids, text, offset, num_bytes)

    def add_logprobs(self, tokens: Iterable[TokenLogprob]) -> None:
        row = RowLogprobs(tokens=tokens)
        if isinstance(last := self._last(), Row):
            last.logprobs = row.SerializeToString()
            self._grow(len(last.logprobs))
        if self.reader is not None:
            self.reader.outbox.add_logprobs(row.tokens)

    def add_parts(self, parts: RowParts) -> None:
        if isinstance(last := self._last(), Row):
            last.parts = parts.SerializeToString()
            self._grow(len(last.parts))
        if self.reader is not None:
            self.reader.outbox.add_parts(parts)

    def add_start(self, start: Start) -> None:
        kept = Start()
        kept.CopyFrom(start)
        self._keep(Begin(self._choices[start.stream_id], kept))
        if self.reader is not None:
            self.reader.outbox.add_start(start)

    def add_finish(self, finish: OutputFinish) -> None:
        choice = self._choices[finish.stream_id]
        finish.ended_at = int(time.time())
        self._ended[choice] = True
        self._cancelled |= {choice} if finish.reason == FINISH_REASON_CANCELLED else set()
        self._keep(End(choice, finish))
        if self.reader is not None:
            self._pass_on(finish)
        if self.has_ended and not self.is_lost:
            self._end_in(KEEP_SECONDS)

    def add_embedding(self, embedding: Embedding) -> None:
        raise AssertionError("a prompt that is embedded is no stream")

    def add_prompt_part(self, part: OutputPromptLogprobs) -> None:
        """Not kept: who wants them cannot have the stream resumed."""
        if self.reader is not None:
            self.reader.outbox.add_prompt_part(part)

    # Its readers.

    def begin(self, reader: GatewaySession, opening: Open, context: bytes) -> None:
        """Choices of it are computed anew, from what `reader` has had of them."""
        add = opening.add
        if self._bill is not None and self.reader is None:
            self._logs.bills.superseded(self._bill)
        if self.reader is not reader:
            self._leave_reader()
            # While nobody reads: the numbers of its choices are the last reader's, and others' by now.
            for place in list(self._held.values()):
                place.abandon("superseded")
            self._forget_numbers()
            self.reader, self.num_readers = reader, self.num_readers + 1
        self._stop_timer()
        self.attempt, self._num_prompt_tokens = max(self.attempt, add.attempt), add.num_prompt_tokens
        if context:
            self._grow(len(context) - len(self.context))
            self.context = context
        for stream_id, choice in zip(add.stream_ids, add.choice_indices or range(self.num_choices), strict=True):
            delivered = opening.delivered_bytes[0] if opening.delivered_bytes else 0
            self._cut(choice, add.num_output_tokens, delivered)
            self._number(choice, stream_id)

    def runs(self, streams: Iterable[OutputStream], bill: Bill | None) -> None:
        """What computes its choices now, and who pays."""
        self._bill = bill
        for stream in streams:
            self._streams[self._choices[stream.stream_id]] = stream

    def take_over(self, reader: GatewaySession, stream_ids: Sequence[int], record_id: str) -> dict[int, Place]:
        """Gives it to another reader, whose numbers these are, and which charges the rest under that id; the choices
        that run, by these numbers."""
        self._leave_reader()
        if not self.has_ended:
            self._stop_timer()
        held, self._held = self._held, {}
        self._forget_numbers()
        self._bill_to(reader, record_id)
        self.reader, self.num_readers = reader, self.num_readers + 1
        for choice, stream_id in enumerate(stream_ids):
            self._number(choice, stream_id)
        return {stream_ids[choice]: place for choice, place in held.items()}

    def tell(self) -> None:
        """Says to the reader everything that was said so far."""
        assert self.reader is not None
        outbox = self.reader.outbox
        prompt_tokens, output_tokens = self._charged
        outbox.add_attached(
            Attached(
                stream_ids=self.stream_ids,
                granted=self._granted(),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
            )
        )
        for entry in self._entries:
            stream_id = self.stream_ids[entry.choice]
            if isinstance(entry, Row):
                outbox.add_row(stream_id, entry.first, entry.token_ids, entry.text, entry.offset, entry.num_bytes)
                if entry.logprobs is not None:
                    outbox.add_logprobs(RowLogprobs.FromString(entry.logprobs).tokens)
                if entry.parts is not None:
                    outbox.add_parts(RowParts.FromString(entry.parts))
            elif isinstance(entry, Begin):
                start = Start()
                start.CopyFrom(entry.start)
                start.stream_id = stream_id
                outbox.add_start(start)
            else:
                finish = OutputFinish()
                finish.CopyFrom(entry.finish)
                finish.stream_id = stream_id
                self._pass_on(finish)

    def let_go(self, places: dict[int, Place], said: LetGo | None) -> None:
        """Nobody reads for now; `places` are by stream id. Without a word of its reader whatever that was to charge is
        the next one's, under the same number: should it have been charged after all, that counts once."""
        self.reader = None
        if said is not None:
            self._charged = (said.prompt_tokens, said.output_tokens)
            self._settle_bill()
        else:
            self.num_readers -= 1
            if self._bill is not None:
                self._logs.bills.hold(self._bill)
        self._hold(places)
        if not self.has_ended:
            self._end_in(HOLD_SECONDS)

    def found(self) -> Iterator[FoundStream]:
        prompt_tokens, output_tokens = self._charged if self.reader is None else self._all_charged()
        yield FoundStream(
            context=self.context[:CONTEXT_BYTES],
            num_choices=self.num_choices,
            granted=self._granted(),
            num_tokens=self._num_tokens,
            ended=self.has_ended,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            num_readers=self.num_readers,
            attempt=self.attempt,
        )
        for start in range(CONTEXT_BYTES, len(self.context), CONTEXT_BYTES):
            yield FoundStream(context=self.context[start : start + CONTEXT_BYTES])

    # Its memory.

    @property
    def is_lost(self) -> bool:
        """It was too long to be kept: nobody can resume it."""
        return not self._logs.has(self)

    def close(self) -> None:
        """Forgets what was said; its choices go on for the reader, and end without one."""
        self._stop_timer()
        self._entries.clear()
        self.context = b""
        if self.reader is not None:
            self.reader.forget(self)
        elif self._bill is not None:
            self._logs.bills.write_held(self._bill)
        for place in list(self._held.values()):
            place.abandon("nobody_came")

    def _keep(self, entry: Entry) -> None:
        if not self.is_lost:
            self._entries.append(entry)
            self._grow(entry.size)
            if sum(self._num_tokens) > MAX_TOKENS:
                self._logs.drop(self)

    def _grow(self, num_bytes: int) -> None:
        if not self.is_lost:
            self.num_bytes += num_bytes
            self._logs.grow(num_bytes)

    def _last(self) -> Entry | None:
        return self._entries[-1] if self._entries else None

    def _cut(self, choice: int, num_tokens: int, num_bytes: int) -> None:
        """Forgets what was said of a choice past its first tokens and bytes."""
        self._ended[choice], self._num_tokens[choice] = False, num_tokens
        self._cancelled.discard(choice)
        kept = [each for each in self._entries if each.choice != choice or is_within(each, num_tokens, num_bytes)]
        if not self.is_lost:
            self._grow(sum(each.size for each in kept) - sum(each.size for each in self._entries))
            self._entries = kept

    @property
    def open_ids(self) -> list[int]:
        """Its reader's numbers of choices that have not ended."""
        return [stream_id for stream_id, has_ended in zip(self.stream_ids, self._ended, strict=True) if not has_ended]

    def _forget_numbers(self) -> None:
        self.stream_ids, self._choices = [0] * self.num_choices, {}

    def _number(self, choice: int, stream_id: int) -> None:
        assert self.reader is not None
        before = self.stream_ids[choice]
        self.reader.reads(self, stream_id, before if self._choices.pop(before, None) is not None else None)
        self.stream_ids[choice] = stream_id
        self._choices[stream_id] = choice

    def _granted(self) -> list[int]:
        return [self._streams[choice].credit if choice in self._streams else 0 for choice in range(self.num_choices)]

    def _all_charged(self) -> tuple[int, int]:
        """A reader that is there charges whatever it was told and nobody before it."""
        return self._num_prompt_tokens, sum(self._num_tokens)

    def _leave_reader(self) -> None:
        """Whoever reads is told that another does."""
        if self.reader is not None:
            self._charged = self._all_charged()
            self._settle_bill()
            places = self.reader.give_up(self)
            self.reader = None
            self._hold(places)

    def _settle_bill(self) -> None:
        if self._bill is not None:
            self._bill.settle(*self._charged)

    def _bill_to(self, reader: GatewaySession, record_id: str) -> None:
        """What nobody before it charges."""
        if self._bill is not None and record_id:
            self._logs.bills.superseded(self._bill)
            self._bill = self._bill.next(record_id, self._charged)
            self._logs.bills.give(self._bill, reader.gateway)

    def _hold(self, places: dict[int, Place]) -> None:
        for stream_id, place in places.items():
            self._held[self._choices[stream_id]] = place
            place.stream.belong_to(stream_id, self._ended_alone)

    def _pass_on(self, finish: OutputFinish) -> None:
        assert self.reader is not None
        passed = OutputFinish()
        passed.CopyFrom(finish)
        self.reader.outbox.add_finish(passed)
        # What is said of other choices from now on comes behind it, as it does in the log.
        self.reader.outbox.seal()

    def _ended_alone(self, stream: OutputStream) -> None:
        if (place := self._held.pop(self._choices[stream.stream_id], None)) is not None:
            place.opened.one_ended()

    def _end_in(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._logs.drop, self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
