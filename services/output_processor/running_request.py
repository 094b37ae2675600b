"""One request at its engine: its choices, and the parts that have not arrived yet. Knows nothing
about text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.proto.engine_pb2 import AddPart
from headwater.proto.output_processor_pb2 import Open

from ..runtime.tracing import Span
from . import metrics as output_metrics
from .engines import EngineLink
from .stream import OutputStream


class RunningRequest:
    """A request whose prompt, grammar and resumed output may arrive in parts; `span` ends with
    it."""

    def __init__(
        self, link: EngineLink, opening: Open, streams: Sequence[OutputStream], span: Span
    ) -> None:
        add = opening.add
        stream_ids = list(opening.add.stream_ids)
        self.first_id = stream_ids[0]
        """Stream id by which the gateway names the request in parts."""
        self._link = link
        self._span = span
        self._num_running = len(streams)
        self._num_missing_prompt = add.num_prompt_tokens - len(add.prompt_ids)
        self._num_missing_output = add.num_output_tokens
        self._num_missing_grammar = add.num_grammar_bytes - len(add.grammar)
        """Number of bytes of the grammar that are missing."""
        self._resumed = streams[0] if add.num_output_tokens else None
        """Stream that goes on where an earlier attempt ended."""
        self._delivered_bytes = opening.delivered_bytes[0] if opening.delivered_bytes else 0
        # A request that can be resumed goes on while no gateway takes its tokens.
        self._request = link.open(opening, streams, is_paced=not opening.resumable)
        numbered = zip(self._request.streams.items(), stream_ids, strict=True)
        self.choices = [
            RunningChoice(self, link, number, stream, each) for (number, stream), each in numbered
        ]
        output_metrics.STREAMS.inc(len(streams))

    @property
    def is_complete(self) -> bool:
        """Whether all parts have come."""
        return (
            max(self._num_missing_prompt, self._num_missing_output, self._num_missing_grammar) <= 0
        )

    @property
    def has_ended(self) -> bool:
        return self._num_running == 0

    def extend(self, part: AddPart) -> None:
        self._num_missing_prompt -= len(part.prompt_ids)
        self._num_missing_grammar -= len(part.grammar)
        output_ids = list(part.output_ids)
        self._link.extend(self._request, part)
        self.replay(output_ids)

    def replay(self, output_ids: list[int]) -> None:
        """Adds a part of the resumed output; the stream starts when all parts have arrived."""
        if self._resumed is None or not output_ids or self._resumed.ended:
            return
        self._num_missing_output -= len(output_ids)
        self._resumed.replay(output_ids)
        if self._num_missing_output <= 0:
            self._resumed.resume(self._delivered_bytes)
        if self._resumed.ended:
            self._link.cancel(self._request.first, "nothing_to_resume")

    def on_choice_end(self) -> None:
        output_metrics.STREAMS.dec()
        self._num_running -= 1
        if self.has_ended:
            self._span.end()


class RunningChoice:
    """One stream of the request. A session reads it under `stream_id`, or none does for a time."""

    __slots__ = ("_link", "_number", "_on_end", "_stream", "request", "stream_id")

    def __init__(
        self,
        request: RunningRequest,
        link: EngineLink,
        number: int,
        stream: OutputStream,
        stream_id: int,
    ) -> None:
        """`number` is the stream's id at the engine."""
        self.request = request
        self.stream_id = stream_id
        self._link = link
        self._number = number
        self._stream = stream
        self._on_end: Callable[[RunningChoice], None] | None = None
        stream.on_end = self._on_stream_end

    @property
    def ended(self) -> bool:
        return self._stream.ended

    @property
    def index(self) -> int:
        """Index of the choice within the request."""
        return self._stream.choice_index

    @property
    def credit(self) -> int:
        """Output index up to which tokens may come."""
        return self._stream.credit

    def attach(self, stream_id: int, on_end: Callable[[RunningChoice], None]) -> None:
        """Makes a session the reader."""
        self.stream_id = stream_id
        self._on_end = on_end

    def detach(self) -> None:
        """Lets the choice go on without a reader."""
        self._on_end = None

    def grant(self, tokens: int) -> None:
        self._stream.grant(tokens)
        self._link.grant(self._number, tokens)

    def on_delivered(self, num_tokens: int) -> None:
        """Notes that `num_tokens` more of its tokens have left for the gateway."""
        self._link.on_delivered(self._number, num_tokens)

    def probe(self) -> None:
        """Asks the engine to end it if the engine does not have it."""
        self._link.probe(self._number)

    def abandon(self, reason: str) -> None:
        """Ends the request, here and at its engine."""
        self._link.cancel(self._number, reason)
        self._stream.cancel()

    def _on_stream_end(self) -> None:
        self.request.on_choice_end()
        if self._on_end is not None:
            self._on_end(self)
