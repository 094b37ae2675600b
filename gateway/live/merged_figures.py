"""Figures of several gateways as those of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .gateway_figures import GatewayFigures, TenantFigures
from .replica_rows import Standing
from .request_rows import last_ended, oldest_running


def merge(told: Sequence[GatewayFigures]) -> GatewayFigures:
    """Counts are added up; of the requests the oldest that run are left, and those that ended last. `told` begins with
    the gateway whose name the result has."""
    return GatewayFigures(
        gateway_id=told[0].gateway_id,
        totals=_sums(each.totals for each in told),
        tenants=_tenants(told),
        models=_sums_by_place(each.models for each in told),
        running=oldest_running(row for each in told for row in each.running),
        recent=last_ended(row for each in told for row in each.recent),
        routed=_sums_by_place(each.routed for each in told),
        standings=_by_gateway(each.standings for each in told),
        event_lags={name: lag for each in told for name, lag in each.event_lags.items()},
    )


def _sums(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for each in counts:
        for name, count in each.items():
            totals[name] = totals.get(name, 0) + count
    return totals


def _sums_by_place(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of tuples of the same length, by name."""
    totals: dict[str, Any] = {}
    for each in counts:
        for name, numbers in each.items():
            totals[name] = tuple(map(sum, zip(totals[name], numbers, strict=True))) if name in totals else numbers
    return totals


def _by_gateway(found: Iterable[Mapping[str, Mapping[str, Standing]]]) -> dict[str, dict[str, Standing]]:
    """Standing of each replica at each gateway: by `life_of` the replica, then by gateway."""
    merged: dict[str, dict[str, Standing]] = {}
    for each in found:
        for life, standings in each.items():
            merged.setdefault(life, {}).update(standings)
    return merged


def _tenants(told: Iterable[GatewayFigures]) -> dict[str, TenantFigures]:
    merged: dict[str, TenantFigures] = {}
    for each in told:
        for key, figures in each.tenants.items():
            merged[key] = _added(merged[key], figures) if key in merged else figures
    return merged


def _added(one: TenantFigures, other: TenantFigures) -> TenantFigures:
    """The name is that of the one that has any."""
    return TenantFigures(
        id=one.id or other.id,
        num_running=one.num_running + other.num_running,
        num_waiting=one.num_waiting + other.num_waiting,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
    )
