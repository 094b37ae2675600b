"""Adapters that engines were started with, by name: all tenants may use them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headwater.services.runtime.member import Member, ServedAdapter


def published(engines: Iterable[Member]) -> dict[str, tuple[str, ServedAdapter]]:
    """Adapters by name, each with the name of its base model. Where engines were started with other
    versions of a name, the version that was published last counts."""
    found: dict[str, tuple[str, ServedAdapter]] = {}
    for base, adapter in _named(engines):
        known = found.get(adapter.name)
        if known is None or known[1].published_at < adapter.published_at:
            found[adapter.name] = base, adapter
    return found


def _named(engines: Iterable[Member]) -> Iterator[tuple[str, ServedAdapter]]:
    for engine in engines:
        if engine.model is not None and not engine.draining:
            yield from ((engine.model.name, each) for each in engine.adapters if each.name)
