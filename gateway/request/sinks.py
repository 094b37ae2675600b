"""Sinks of answers that cannot be written at once: gathered whole, or held and merged until there
is room."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from headwater.proto.common_pb2 import TokenLogprob, ToolCallDelta
from headwater.proto.output_processor_pb2 import RowParts

from ..stages.output_session import Scores
from .choice import Choice


class CallPiece(msgspec.Struct):
    """Part of one call; `id` and `name` are empty unless the call begins here."""

    index: int
    id: str
    name: str
    arguments: list[str]
    is_text: bool = False
    """Whether it calls a custom tool; `arguments` is then the text that the tool takes."""


class Piece(msgspec.Struct):
    """Piece of one choice's output."""

    choice: Choice
    texts: list[str] = msgspec.field(default_factory=list)
    thoughts: list[str] = msgspec.field(default_factory=list)
    calls: list[CallPiece] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    def add(
        self, text: str, token_ids: list[int], logprobs: Scores, parts: RowParts | None
    ) -> None:
        self.texts.append(text)
        self.token_ids += token_ids
        self.logprobs += logprobs
        if parts is not None:
            self.thoughts.append(parts.reasoning)
            for delta in parts.tool_calls:
                self._add_call(delta)

    def _add_call(self, delta: ToolCallDelta) -> None:
        """Joins the deltas of one call. A piece has few calls, each in many deltas."""
        is_text = delta.HasField("input")
        content = delta.input if is_text else delta.arguments
        for call in self.calls:
            if call.index == delta.index:
                call.arguments.append(content)
                call.id = call.id or delta.id
                call.name = call.name or delta.name
                return
        self.calls.append(CallPiece(delta.index, delta.id, delta.name, [content], is_text))


class Gathered:
    """A sink that keeps whole answers."""

    def __init__(self) -> None:
        self.answers: dict[Choice, Piece] = {}

    def piece(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: Scores,
        parts: RowParts | None,
    ) -> bool:
        self.of(choice).add(text, token_ids, logprobs, parts)
        return True

    def ended(self, choice: Choice) -> None:
        self.of(choice)

    def of(self, choice: Choice) -> Piece:
        if choice not in self.answers:
            self.answers[choice] = Piece(choice)
        return self.answers[choice]


class Held:
    """Pieces that a reader has not taken yet: one merged piece a choice. The credit of the choice
    bounds it."""

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}

    def add(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: Scores,
        parts: RowParts | None,
    ) -> None:
        piece = self._pieces.get(choice.index)
        if piece is None:
            piece = self._pieces[choice.index] = Piece(choice)
        piece.add(text, token_ids, logprobs, parts)

    @property
    def waits_for_scores(self) -> bool:
        """Whether the pieces have to wait for the prompt's log probabilities, which are still
        coming."""
        return any(piece.choice.prompt.awaits_scores for piece in self._pieces.values())

    def pop(self, choice: Choice | None = None) -> Piece | None:
        """Removes and returns the oldest piece, or the one of a choice; its tokens count as
        taken."""
        index = choice.index if choice is not None else next(iter(self._pieces), None)
        piece = self._pieces.pop(index, None) if index is not None else None
        if piece is not None:
            piece.choice.taken(len(piece.token_ids))
        return piece


class PieceQueue:
    """A sink that a loop reads: pieces merge while the reader is busy."""

    def __init__(self) -> None:
        self._held = Held()
        self._ended: list[Choice] = []
        self._news = asyncio.Event()

    def piece(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: Scores,
        parts: RowParts | None,
    ) -> bool:
        self._held.add(choice, text, token_ids, logprobs, parts)
        self._news.set()
        return False

    def ended(self, choice: Choice) -> None:
        self._ended.append(choice)
        self._news.set()

    async def read(self, work: asyncio.Task[None]) -> AsyncIterator[Piece | Choice]:
        """Yields pieces, and choices that have ended behind their last piece, until `work` is done;
        raises the error of `work`."""
        work.add_done_callback(lambda _: self._news.set())
        while True:
            self._news.clear()
            while not self._held.waits_for_scores and (piece := self._held.pop()) is not None:
                yield piece
            while self._ended:
                choice = self._ended.pop(0)
                if (piece := self._held.pop(choice)) is not None:
                    yield piece
                yield choice
            if work.done() and not self._news.is_set():
                await work
                return
            await self._news.wait()


class OrderedQueue:
    """A sink that a loop reads: every reader gets the same pieces, however slow. Credit bounds what
    waits."""

    def __init__(self) -> None:
        self._waiting: deque[Piece | Choice] = deque()
        self._news = asyncio.Event()

    def piece(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: Scores,
        parts: RowParts | None,
    ) -> bool:
        piece = Piece(choice)
        piece.add(text, token_ids, logprobs, parts)
        self._waiting.append(piece)
        self._news.set()
        return False

    def ended(self, choice: Choice) -> None:
        self._waiting.append(choice)
        self._news.set()

    async def read(self, work: asyncio.Task[None]) -> AsyncIterator[Piece | Choice]:
        """Yields pieces, and choices that have ended, in their order until `work` is done; raises
        the error of `work`."""
        work.add_done_callback(lambda _: self._news.set())
        while True:
            self._news.clear()
            while self._waiting:
                news = self._waiting.popleft()
                if isinstance(news, Piece):
                    news.choice.taken(len(news.token_ids))
                yield news
            if work.done() and not self._news.is_set():
                await work
                return
            await self._news.wait()
