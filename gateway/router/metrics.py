"""The router's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headwater.services.index.kv_index import Column

from ..counters import LabelledCounter, LabelledHistogram

_MICROSECONDS = tuple(each * 1e-6 for each in (50, 100, 200, 300, 500, 750, 1000, 2000, 5000, 10_000))


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> LabelledCounter:
            return LabelledCounter(f"headwater_router_{name}", documentation, labels, registry=registry)

        self.decisions = counter("decisions", "Requests routed, by what decided", "reason")
        self.seconds = LabelledHistogram(
            "headwater_router_decision_seconds", "Time to decide", _MICROSECONDS, registry=registry
        ).of()
        self.predicted = counter("predicted_cached_tokens", "Prompt tokens believed to be cached")
        self.actual = counter("actual_cached_tokens", "Of the same requests, found cached")
        self.event_lag = LabelledHistogram(
            "headwater_router_event_lag_seconds",
            "How much later than at best in the last minutes a replica's cache events become known here",
            (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        ).of()
        self.doubted = counter("doubted", "Prefills that left a replica's trust below 0.7", "replica")


class TrustCollector(Collector):
    """Trust in the replicas that are there. One that has left is not exported any longer."""

    def __init__(self, trust: Callable[[], Mapping[str, float]]) -> None:
        self._trust = trust

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "headwater_router_trust", "How far a replica's column is believed, 0 to 1", labels=["replica"]
        )
        for replica_id, value in self._trust().items():
            family.add_metric([replica_id], value)
        yield family


class IndexCollector(Collector):
    """How much is known of each replica's cache; the replica's own numbers are in its heartbeats."""

    def __init__(self, columns: Callable[[], Sequence[Column]]) -> None:
        self._columns = columns

    def collect(self) -> Iterator[GaugeMetricFamily]:
        blocks = GaugeMetricFamily("headwater_index_blocks", "Blocks known to be cached", labels=["replica"])
        batch = GaugeMetricFamily("headwater_index_batch", "The last batch of events taken in", labels=["replica"])
        synced = GaugeMetricFamily("headwater_index_synced", "1: no batch before it is missing", labels=["replica"])
        for column in self._columns():
            blocks.add_metric([column.replica_id], len(column.blocks))
            batch.add_metric([column.replica_id], column.seq)
            synced.add_metric([column.replica_id], column.is_synced)
        yield from (blocks, batch, synced)
