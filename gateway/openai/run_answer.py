"""The work behind an answer of chat or completions, and what is said while it is silent."""

from __future__ import annotations

from headwater.services.runtime import errors

from ..request.cluster import Cluster
from ..request.prompt_runs import prepare_all, run_all
from ..request.resumed import ResumedGeneration, run_resumed
from .answers import Answer, EventStream


async def run_answer(line: Cluster, answer: Answer) -> None:
    """Every prompt is checked before any is computed."""
    try:
        await prepare_all(answer.generations)
        await answer.shape.prepared(line, answer.generations)
    except errors.BadRequest as error:
        raise error.in_words_of(answer.shape.renamed) from None
    if isinstance(resumed := answer.generations[0], ResumedGeneration):
        await run_resumed(resumed)
    else:
        await run_all(answer.generations)


class Silence:
    """Comments in a stream that said nothing since the last tick."""

    def __init__(self, stream: EventStream | None) -> None:
        self._stream, self._num_events = stream, -1

    def tick(self) -> None:
        if self._stream is not None:
            if self._stream.out.num_events == self._num_events or not self._stream.out.started:
                self._stream.keep_alive()
            self._num_events = self._stream.out.num_events
