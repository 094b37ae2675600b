"""Adapters that engines report: which model and which content a client's name stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headwater.services.runtime.member import Member, ServedAdapter

NO_ADAPTER = b""


@dataclass(frozen=True, slots=True)
class Target:
    """Model that answers a request, and the adapter with which it does."""

    model: str
    adapter: bytes = NO_ADAPTER
    """Hash of the adapter's content; empty: none."""


def published(engines: Iterable[Member]) -> dict[str, tuple[str, ServedAdapter]]:
    """Adapters by name, each with the name of its base model. While engines change over to another
    version of a name, the version that was published last counts."""
    found: dict[str, tuple[str, ServedAdapter]] = {}
    for base, adapter in _named(engines):
        known = found.get(adapter.name)
        if known is None or known[1].published_at < adapter.published_at:
            found[adapter.name] = base, adapter
    return found


def target_of(name: str, engines: Iterable[Member]) -> Target:
    """Target of a name that is no model's; one that is no adapter's stands for itself."""
    known = published(engines).get(name)
    return Target(name) if known is None else Target(known[0], known[1].digest)


def _named(engines: Iterable[Member]) -> Iterator[tuple[str, ServedAdapter]]:
    for engine in engines:
        if engine.model is not None and not engine.draining:
            yield from ((engine.model.name, each) for each in engine.adapters if each.name)
