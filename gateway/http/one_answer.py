"""One generation over HTTP, from the tenant's minute to the end of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headwater.services.runtime import errors

from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.prepare import prepare
from ..request.prompt_runs import run_all
from ..request.sinks import Gathered
from ..wire.event_sink import EventSink
from .http_exchange import Exchange

NamesOf = Callable[[], Mapping[str, str]]
"""Returns a client's names of fields by the contract's names. Called for errors alone."""


async def run_one(
    cluster: Cluster,
    exchange: Exchange,
    generation: Generation,
    sink: EventSink | Gathered,
    *,
    names_of: NamesOf,
    silence: float,
) -> None:
    """Runs a generation until it has ended, its deadline has passed or its client has left. A
    stream sends a keep-alive after `silence` seconds without output."""
    tick = sink.keep_alive if isinstance(sink, EventSink) else None
    async with generation.request.caller.within_deadline():
        work = _run(cluster, generation, sink, names_of)
        await exchange.unless_client_leaves(work, silence=silence, on_silence=tick)


async def _run(
    cluster: Cluster, generation: Generation, sink: EventSink | Gathered, names_of: NamesOf
) -> None:
    try:
        await prepare(cluster, generation)
    except errors.BadRequest as error:
        raise error.in_words_of(names_of()) from None
    await run_all(cluster, [generation], sink)
