"""Merges figures of several gateways into the figures of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add, or_
from typing import Any, TypeVar

from .gateway_figures import GatewayFigures, TenantFigures
from .request_rows import last_ended, oldest_running

ValueT = TypeVar("ValueT")


def merge(figures: Sequence[GatewayFigures]) -> GatewayFigures:
    """Counts are added up; of the requests the oldest that run are left, and those that ended last.
    `figures` begins with the gateway whose name the result has."""
    return GatewayFigures(
        gateway_id=figures[0].gateway_id,
        totals=_joined((each.totals for each in figures), add),
        tenants=_joined((each.tenants for each in figures), _added),
        models=_joined((each.models for each in figures), _sums),
        running=oldest_running(row for each in figures for row in each.running),
        recent=last_ended(row for each in figures for row in each.recent),
        routed=_joined((each.routed for each in figures), _sums),
        standings=_joined((each.standings for each in figures), or_),
        event_lags={name: lag for each in figures for name, lag in each.event_lags.items()},
    )


def _joined(
    found: Iterable[Mapping[str, ValueT]], join: Callable[[ValueT, ValueT], ValueT]
) -> dict[str, ValueT]:
    """Values by name; values that several gateways have under one name are joined."""
    joined: dict[str, ValueT] = {}
    for each in found:
        for name, value in each.items():
            joined[name] = join(joined[name], value) if name in joined else value
    return joined


def _sums(one: tuple[Any, ...], other: tuple[Any, ...]) -> Any:
    """Sums of tuples of the same length."""
    return tuple(map(add, one, other))


def _added(one: TenantFigures, other: TenantFigures) -> TenantFigures:
    """The merged row has the name that any of the rows has."""
    _, *counts = TenantFigures.__struct_fields__
    return TenantFigures(
        one.id or other.id, *(getattr(one, name) + getattr(other, name) for name in counts)
    )
