"""Beam search over an engine that has none: each step asks for the likeliest next tokens of every
beam.

A beam is the prompt and the tokens chosen so far, so the engine finds all of it but the last block
in its prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from headwater.proto import common_pb2, engine_pb2, output_processor_pb2
from headwater.services.runtime import errors

from ..stages.output_session import OutputSession, Scores
from .stream_failure import BROKEN, Cause, StreamLost, error_of

Started = Callable[[engine_pb2.Start], None]
MakeOpen = Callable[[Sequence[int], common_pb2.Sampling], output_processor_pb2.Open]


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that may become an answer."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0

    def score(self, length_penalty: float) -> float:
        return float(self.logprob / max(len(self.token_ids), 1) ** length_penalty)


class BeamSearch:
    """One search on one engine. `make_open` renders a request for a prompt's continuation;
    `started` is called when a prompt is computed, the client's first."""

    def __init__(
        self,
        session: OutputSession,
        prompt_ids: Sequence[int],
        sampling: common_pb2.Sampling,
        make_open: MakeOpen,
        started: Started,
    ) -> None:
        self._session = session
        self._prompt_ids = prompt_ids
        self._make_open = make_open
        self._started = started
        self._width = max(sampling.n, sampling.best_of)
        self._max_tokens = sampling.max_tokens
        self._length_penalty = sampling.length_penalty
        self._step = common_pb2.Sampling()
        self._step.CopyFrom(sampling)
        # One more than twice as many tokens as beams: at most half of them end their beam, and as
        # many go on.
        self._step.MergeFrom(
            common_pb2.Sampling(
                n=1,
                temperature=0,
                max_tokens=1,
                min_tokens=0,
                logprobs=True,
                top_logprobs=2 * self._width,
            )
        )
        del self._step.stop[:]

    async def run(self, ends: frozenset[int]) -> list[Beam]:
        """The best beams, best first; `ends` are ids that end an answer."""
        live = [Beam()]
        ended = list[Beam]()
        for _ in range(self._max_tokens):
            grown = [beam for more in await asyncio.gather(*map(self._grow, live)) for beam in more]
            ended = self._best([*ended, *(beam for beam in grown if beam.token_ids[-1] in ends)])
            live = sorted(
                (beam for beam in grown if beam.token_ids[-1] not in ends),
                key=attrgetter("logprob"),
                reverse=True,
            )
            live = live[: self._width]
            if not live or (len(ended) == self._width and self._is_settled(ended[-1], live[0])):
                break
        return self._best([*ended, *live])

    async def _grow(self, beam: Beam) -> list[Beam]:
        candidates = _Candidates(self._started)
        opening = self._make_open([*self._prompt_ids, *beam.token_ids], self._step)
        [stream_id] = self._session.open(opening, [candidates])
        try:
            scores = await candidates.scores
        finally:
            self._session.cancel(stream_id, "client_gone")
        return [Beam((*beam.token_ids, top.token_id), beam.logprob + top.logprob) for top in scores]

    def _best(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: beam.score(self._length_penalty), reverse=True)[
            : self._width
        ]

    def _is_settled(self, worst: Beam, best_live: Beam) -> bool:
        """Whether no live beam will do better: log probabilities only fall."""
        longest = max(len(best_live.token_ids), self._max_tokens if self._length_penalty > 0 else 1)
        return bool(
            best_live.logprob / longest**self._length_penalty <= worst.score(self._length_penalty)
        )


class _Candidates:
    """Receives the likeliest next tokens of one beam; see `Receiver`."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self.received_at = time.perf_counter()
        self.scores: asyncio.Future[Sequence[common_pb2.TopLogprob]] = (
            asyncio.get_running_loop().create_future()
        )

    def receive(
        self,
        first: int,
        token_ids: list[int],
        text: str,
        offset: int,
        now: float,
        logprobs: Scores,
        parts: output_processor_pb2.RowParts | None,
    ) -> None:
        if logprobs and not self.scores.done():
            self.scores.set_result(list(logprobs[0].top))

    def prompt_scored(self, part: output_processor_pb2.OutputPromptLogprobs) -> None: ...
    def embedded(self, embedding: common_pb2.Embedding) -> None: ...

    def finished(self, finish: output_processor_pb2.OutputFinish) -> None:
        if finish.reason in BROKEN:
            self.lost(error_of(finish))
        else:
            self.lost(StreamLost("the engine ended a beam without a word", Cause.FAULT))

    def lost(self, error: errors.HeadwaterError) -> None:
        if not self.scores.done():
            self.scores.set_exception(error)
