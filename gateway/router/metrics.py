"""What the router counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_MICROSECONDS = tuple(each * 1e-6 for each in (50, 100, 200, 300, 500, 750, 1000, 2000, 5000, 10_000))


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "headwater_router_decisions", "Requests routed, by what decided", ["reason"], registry=registry
        )
        self.seconds = Histogram(
            "headwater_router_decision_seconds", "Time to decide", buckets=_MICROSECONDS, registry=registry
        )
        self.predicted = Counter(
            "headwater_router_predicted_cached_tokens", "Prompt tokens believed to be cached", registry=registry
        )
        self.actual = Counter(
            "headwater_router_actual_cached_tokens", "Of the same requests, found cached", registry=registry
        )
        self.event_lag = Histogram(
            "headwater_router_event_lag_seconds",
            "From an engine's telling what it caches to its being known here, by both clocks",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        )
        self.trust = Gauge(
            "headwater_router_trust", "How far a replica's column is believed, 0 to 1", ["replica"], registry=registry
        )
        self.doubted = Counter(
            "headwater_router_doubted", "Prefills that left a replica's trust below 0.7", ["replica"], registry=registry
        )
