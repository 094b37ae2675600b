"""The router's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from headwater.services.index.kv_index import Column

from ..counters import LabelledCounter, LabelledGauges, LabelledHistogram

_MICROSECONDS = tuple(
    each * 1e-6 for each in (50, 100, 200, 300, 500, 750, 1000, 2000, 5000, 10_000)
)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> LabelledCounter:
            return LabelledCounter(
                f"headwater_router_{name}", documentation, labels, registry=registry
            )

        self.decisions = counter("decisions", "Requests routed, by what decided", "reason")
        self.seconds = LabelledHistogram(
            "headwater_router_decision_seconds", "Time to decide", _MICROSECONDS, registry=registry
        ).of()
        self.predicted = counter("predicted_cached_tokens", "Prompt tokens believed to be cached")
        self.actual = counter("actual_cached_tokens", "Of the same requests, found cached")
        self.event_lag = LabelledHistogram(
            "headwater_router_event_lag_seconds",
            "How much later than at best in the last minutes a replica's cache events become "
            "known here",
            (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        ).of()
        self.doubted = counter(
            "doubted", "Prefills that left a replica's trust below 0.7", "replica"
        )


def trust_gauge(trust: Callable[[], Mapping[str, float]]) -> LabelledGauges:
    """Trust in the present replicas; a replica that has left is no longer exported."""
    gauges = {"headwater_router_trust": "How far a replica's column is believed, 0 to 1"}
    return LabelledGauges(
        "replica", gauges, lambda: ((name, [value]) for name, value in trust().items())
    )


def index_gauges(columns: Callable[[], Sequence[Column]]) -> LabelledGauges:
    """How much is known of each replica's cache; the replica's own numbers are in its
    heartbeats."""
    gauges = {
        "headwater_index_blocks": "Blocks known to be cached",
        "headwater_index_batch": "The last batch of events taken in",
        "headwater_index_synced": "1: no batch before it is missing",
    }
    return LabelledGauges(
        "replica",
        gauges,
        lambda: (
            (each.replica_id, (len(each.blocks), each.seq, each.is_synced)) for each in columns()
        ),
    )
