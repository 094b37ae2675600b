"""Metrics of the gateway's process, and of stage processes that restart."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import prometheus_client
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Change, ChangeKind, Members
from headwater.services.runtime.process_facts import ProcessFacts

from ..settings import GatewaySettings

COUNTED = (Kind.PROCESSOR, Kind.OUTPUT_PROCESSOR, Kind.ENGINE)
MAX_KNOWN = 256
"""Most processes that are remembered to recognize restarts, latest ones first."""


class StageRestarts(Collector):
    """Counts how often a process came back under its name: a loop of restarts, where it is
    often."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """Epoch and number of restarts of each process, by its stage and name."""

    def follow(self, change: Change) -> None:
        member = change.member
        # A seed, known by its address alone, has no epoch yet.
        if change.kind is not ChangeKind.JOINED or member.kind not in COUNTED or not member.epoch:
            return
        key = member.kind.value, member.replica_id
        epoch, count = self._known.get(key, (member.epoch, 0))
        self._known[key] = member.epoch, count + (epoch != member.epoch)
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "headwater_stage_restarts",
            "Times that a process came back under its name",
            labels=["stage", "replica"],
        )
        for labels, (_, count) in self._known.items():
            family.add_metric(labels, count)
        yield family


@contextlib.contextmanager
def process_metrics(settings: GatewaySettings, members: Members) -> Iterator[None]:
    """Exports them inside the `with` block."""
    registry = prometheus_client.REGISTRY
    state = Path(settings.tenants_file).parent if settings.tenants_file else None
    facts = ProcessFacts(
        "gateway",
        disks={"state": state},
        certificates={
            "clients": settings.tls_cert_file,
            "stages": settings.stage_tls_cert_file,
        },
    )
    registry.register(facts)
    registry.register(restarts := StageRestarts())
    members.on_change(restarts.follow)
    try:
        yield
    finally:
        members.forget_listener(restarts.follow)
        registry.unregister(restarts)
        registry.unregister(facts)
