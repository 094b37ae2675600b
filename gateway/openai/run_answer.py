"""Runs the prompts behind an answer of chat or completions, and writes comments while the stream is
silent."""

from __future__ import annotations

from headwater.services.runtime import errors

from ..request.choice import Sink
from ..request.cluster import Cluster
from ..request.prepare import prepare_all
from ..request.prompt_runs import run_all
from .answers import Answer, EventStream


async def run_answer(cluster: Cluster, answer: Answer, sink: Sink) -> None:
    """Runs the prompts of an answer. Every prompt is checked before any is computed."""
    try:
        await prepare_all(cluster, answer.generations)
        await answer.renderer.prepared(cluster, answer.generations)
    except errors.BadRequest as error:
        raise error.in_words_of(answer.renderer.renamed) from None
    await run_all(cluster, answer.generations, sink)


class Silence:
    """Writes comments to a stream that wrote nothing since the last tick."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._num_events = -1

    def tick(self) -> None:
        if self._stream.out.num_events == self._num_events or not self._stream.out.started:
            self._stream.keep_alive()
        self._num_events = self._stream.out.num_events
