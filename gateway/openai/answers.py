"""Renders an answer as JSON: whole, or as a stream of chunks. Holds the parts that chat and
completions share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from headwater.proto.output_processor_pb2 import RowParts

from ..request.choice import Choice
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest
from ..request.prepared_prompt import PreparedPrompt
from ..request.sinks import Gathered, Held, Piece
from ..request.timeline import weights_of
from ..stages.output_session import Scores
from ..tenancy.caller import Caller
from ..wire.body_stream import BodyStream
from ..wire.sse import DONE, keep_alive
from .numbered import NumberedStream
from .schema import Answering

encode = msgspec.json.Encoder().encode
_HOLE = "\x00text\x00"


class Renderer(Protocol):
    """Differences between chat and completions in JSON."""

    object: str
    chunk_object: str
    renamed: dict[str, str]
    """Client's names of fields by the contract's names, where they differ."""

    scores_prompt: bool
    """Whether a stream begins with the prompt's log probabilities."""

    def generation_requests(self, caller: Caller, max_choices: int) -> list[GenerationRequest]:
        """Prompts to answer. Raises `BadRequest`, also for more than `max_choices` answers."""
        ...

    async def prepared(self, cluster: Cluster, generations: Sequence[Generation]) -> None:
        """Called between preparing and running, for renderers that need more of the prompt."""
        ...

    def first_fields(self, choice: Choice) -> dict[str, Any] | None:
        """Fields of a choice's first chunk, before any answer."""
        ...

    def delta(self, text: str) -> dict[str, Any]:
        """Fields of a chunk with more text."""
        ...

    def delta_of(self, piece: Piece) -> dict[str, Any]:
        """Fields of a chunk with the content of a piece; none where the piece has nothing to
        show."""
        ...

    def ending(self) -> dict[str, Any]:
        """Fields of a choice's last chunk."""
        ...

    def finish_reason(self, choice: Choice) -> str | None:
        """Reason for a choice's end, in the client's words."""
        ...

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Fields of a choice that is answered whole."""
        ...

    def beside(self, prompt: PreparedPrompt) -> dict[str, Any]:
        """Fields beside the choices, of the prompt that they share."""
        ...

    def logprobs(self, choice: Choice, tokens: Scores) -> dict[str, Any] | None: ...


class Answer(msgspec.Struct, kw_only=True):
    """Answer to one request: its prompts, its renderer, and the extras that the client asked
    for."""

    id: str
    asked: Answering
    renderer: Renderer
    wants_receipt: bool
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    """Time of creation, seconds since 1970."""
    generations: Sequence[Generation] = ()

    def usage(self) -> dict[str, Any]:
        prompt = sum(generation.num_prompt_tokens for generation in self.generations)
        completion = sum(generation.num_output_tokens for generation in self.generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.cached_tokens for each in self.generations)
            },
            **self._reasoning_usage(),
        }

    def _reasoning_usage(self) -> dict[str, Any]:
        """Number of reasoning tokens, where reasoning is separated from the answer."""
        if not any(
            generation.prepared.answer_format.reasoning_parser for generation in self.generations
        ):
            return {}
        num_tokens = sum(generation.num_reasoning_tokens for generation in self.generations)
        return {"completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def receipt(self) -> dict[str, Any]:
        """Receipt of the prompt, or under `prompts` one for each prompt."""
        receipts = [generation.receipt() for generation in self.generations]
        return receipts[0] if len(receipts) == 1 else {"prompts": receipts}

    def reply(self, gathered: Gathered) -> dict[str, Any]:
        """The whole answer, choices in order."""
        choices = [
            self._whole(choice, gathered.of(choice), generation.request.first_index + rank)
            for generation in self.generations
            for rank, choice in enumerate(generation.answered)
        ]
        body = {
            **self._head(self.renderer.object),
            "choices": choices,
            "usage": self.usage(),
            **self.renderer.beside(self.generations[0].prompt),
        }
        if self.wants_receipt:
            body["receipt"] = self.receipt()
        return body

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head(self.renderer.chunk_object), "choices": choices, **more}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _whole(self, choice: Choice, piece: Piece, index: int) -> dict[str, Any]:
        rendered = {
            "index": index,
            **self.renderer.whole(choice, piece),
            "logprobs": self.renderer.logprobs(choice, piece.logprobs),
            "finish_reason": self.renderer.finish_reason(choice),
            "stop_reason": choice.stop_reason,
            **weights_beside(choice),
        }
        if self.asked.return_token_ids:
            rendered["token_ids"] = piece.token_ids
        return rendered


def weights_beside(choice: Choice) -> dict[str, Any]:
    """Weights that computed a choice, beside its log probabilities: engines may have others
    later."""
    if not choice.prompt.prepared.sampling.logprobs:
        return {}
    return {"weights": weights_of([choice.work])}


class EventStream:
    """A sink that writes an answer as server-sent events, one a step and choice while the client
    takes them."""

    def __init__(
        self,
        answer: Answer,
        open_stream: Callable[[Callable[[], None]], BodyStream | NumberedStream],
    ) -> None:
        self.answer, self.out = answer, open_stream(self._flush)
        options = answer.asked.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._scores_first = answer.renderer.scores_prompt
        self._is_plain = not (
            self._usage_always or answer.asked.return_token_ids or self._scores_first
        )
        self._held = Held()
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def piece(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: Scores,
        parts: RowParts | None,
    ) -> bool:
        # The token path: one string is escaped, the rest of the event was rendered with the
        # choice's first chunk.
        if self._is_plain and not logprobs and parts is None and not self.out.blocked:
            if text:
                head, tail = self._frames.get(choice.index) or self._first_frame(choice)
                self.out.write(head + encode(text) + tail)
            return True
        self._held.add(choice, text, token_ids, logprobs, parts)
        if not self.out.blocked and not (self._scores_first and choice.prompt.awaits_scores):
            self._write_held(choice)
        return False

    def ended(self, choice: Choice) -> None:
        self._write_held(choice)
        if choice.index not in self._frames:
            self._write_opening(choice)
        ending: dict[str, Any] = {
            "index": choice.index,
            **self.answer.renderer.ending(),
            "logprobs": None,
            "finish_reason": self.answer.renderer.finish_reason(choice),
            "stop_reason": choice.stop_reason,
            **weights_beside(choice),
        }
        self._write(self.answer.chunk([ending], **self._usage_field()))

    def keep_alive(self) -> None:
        if not self.out.blocked:
            waits = [generation.wait_seconds() for generation in self.answer.generations]
            self.out.write(keep_alive(max(waits, default=0.0)))

    def last_events(self) -> bytes:
        """Usage and receipt, where they were requested, and the end mark."""
        answer = self.answer
        events = b""
        if self._include_usage or answer.wants_receipt:
            last = answer.chunk([], usage=answer.usage())
            if answer.wants_receipt:
                last["receipt"] = answer.receipt()
            events = _event(last)
        events += DONE
        return self.out.numbered(events) if isinstance(self.out, NumberedStream) else events

    def _first_frame(self, choice: Choice) -> tuple[bytes, bytes]:
        """The frame around the first of a choice's texts, behind the chunk that opens the choice:
        both go out in one write."""
        opening = self._begin(choice)
        head, tail = self._frames[choice.index]
        return opening + head, tail

    def _write_opening(self, choice: Choice) -> None:
        if opening := self._begin(choice):
            self.out.write(opening)

    def _begin(self, choice: Choice) -> bytes:
        """Renders the frame around each of a choice's texts. Returns the event that comes before
        its answer, if there is one."""
        usage = self._usage_field()
        event = b""
        opening = self.answer.renderer.first_fields(choice)
        if opening is not None:
            first: dict[str, Any] = {
                "index": choice.index,
                "logprobs": None,
                **opening,
                "finish_reason": None,
            }
            event = _event(
                self.answer.chunk([first], **usage, **self.answer.renderer.beside(choice.prompt))
            )
        part = {
            "index": choice.index,
            **self.answer.renderer.delta(_HOLE),
            "logprobs": None,
            "finish_reason": None,
        }
        head, _, tail = _event(self.answer.chunk([part], **usage)).partition(encode(_HOLE))
        self._frames[choice.index] = head, tail
        return event

    def _write_held(self, choice: Choice | None = None) -> bool:
        """Writes the held piece of a choice, or of the one that waits longest, as one event.
        Returns False where nothing is held."""
        piece = self._held.pop(choice)
        if piece is None:
            return False
        choice = piece.choice
        if choice.index not in self._frames:
            self._write_opening(choice)
        for part in _apart_from_end(piece):
            self._write_piece(choice, part)
        return True

    def _write_piece(self, choice: Choice, piece: Piece) -> None:
        delta = self.answer.renderer.delta_of(piece)
        if not (
            delta or piece.logprobs or (piece.token_ids and self.answer.asked.return_token_ids)
        ):
            return
        part: dict[str, Any] = {
            "index": choice.index,
            **(delta or self.answer.renderer.delta("")),
            "logprobs": self.answer.renderer.logprobs(choice, piece.logprobs)
            if piece.logprobs
            else None,
            "finish_reason": None,
        }
        if self.answer.asked.return_token_ids:
            part["token_ids"] = piece.token_ids
        self._write(self.answer.chunk([part], **self._usage_field()))

    def _write(self, chunk: dict[str, Any]) -> None:
        self.out.write(_event(chunk))

    def _usage_field(self) -> dict[str, Any]:
        if self._usage_always:
            return {"usage": self.answer.usage()}
        return {"usage": None} if self._include_usage else {}

    def _flush(self) -> None:
        """Writes what was held, merged, one event a choice: the client takes more."""
        while not self.out.blocked and self._write_held():
            pass


def _apart_from_end(piece: Piece) -> list[Piece]:
    """Splits a piece into the part before the token that ended the answer, and that token.

    The guidance library takes all tokens of an event for its text; the token that ends an answer
    has no text there.
    """
    ends = piece.choice.prompt.prepared.eos_token_ids
    if not piece.text or len(piece.logprobs) < 2 or piece.logprobs[-1].chosen.token_id not in ends:
        return [piece]
    end = Piece(piece.choice, token_ids=piece.token_ids[-1:], logprobs=piece.logprobs[-1:])
    return [
        msgspec.structs.replace(
            piece, token_ids=piece.token_ids[:-1], logprobs=piece.logprobs[:-1]
        ),
        end,
    ]


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"
