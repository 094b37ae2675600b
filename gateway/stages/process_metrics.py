"""Metrics of the gateway's process, and of the processes behind it that start again."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry

from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Change, ChangeKind, Members
from headwater.services.runtime.process_facts import ProcessFacts

from ..counters import LabelledCounter
from ..settings import GatewaySettings

COUNTED = (Kind.PROCESSOR, Kind.OUTPUT_PROCESSOR, Kind.ENGINE)
MAX_KNOWN = 4096
"""Processes that are remembered, the latest ones, to know them again."""


class StageRestarts:
    """Counts processes that come back under their name: each of a loop of restarts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = LabelledCounter(
            "headwater_stage_restarts",
            "Processes of a stage that came back under the same name",
            ("stage",),
            registry=registry,
        )
        for kind in COUNTED:
            self._counter.add(kind.value, by=0)
        self._epochs: OrderedDict[tuple[Kind, str], int] = OrderedDict()

    def follow(self, change: Change) -> None:
        member = change.member
        # A seed, known by its address alone, has no epoch yet.
        if change.kind is not ChangeKind.JOINED or member.kind not in COUNTED or not member.epoch:
            return
        key = member.kind, member.replica_id
        if self._epochs.get(key, member.epoch) != member.epoch:
            self._counter.add(member.kind.value)
        self._epochs[key] = member.epoch
        self._epochs.move_to_end(key)
        if len(self._epochs) > MAX_KNOWN:
            self._epochs.popitem(last=False)


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
    restarts = StageRestarts(registry)
    members.on_change(restarts.follow)
    try:
        yield
    finally:
        members.forget_listener(restarts.follow)
        registry.unregister(facts)
