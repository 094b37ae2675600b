"""What the gateway counts. Names, meanings and labels as vLLM's where it has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
TOKEN_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)


class TokenLatency(Collector):
    """A histogram for the token path: `observe` is one search and two additions, without a lock or a label look-up."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        labels = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(labels, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class Metrics:
    """One gateway's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.running = Gauge("headwater_num_requests_running", "Requests that have their turn", registry=registry)
        self.waiting = Gauge("headwater_num_requests_waiting", "Requests that wait for their turn", registry=registry)
        self.streams = Gauge("headwater_num_streams", "Choices open at output processors", registry=registry)
        self.responses = Counter(
            "headwater_http_responses", "HTTP answers by path and status", ["path", "status"], registry=registry
        )
        self.finished = Counter(
            "headwater_request_success",
            "Choices that ended, by reason",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.refused = Counter("headwater_requests_refused", "Requests refused, by code", ["code"], registry=registry)
        self.retries = Counter("headwater_dispatch_retries", "Dispatches after a failed one", registry=registry)
        self.prompt_tokens = Counter(
            "headwater_prompt_tokens", "Prompt tokens of dispatched requests", ["model_name"], registry=registry
        )
        self.cached_tokens = Counter(
            "headwater_cached_prompt_tokens", "Of these, found in the KV cache", ["model_name"], registry=registry
        )
        self.generation_tokens = Counter(
            "headwater_generation_tokens", "Tokens delivered", ["model_name"], registry=registry
        )
        self.queue_time = Histogram(
            "headwater_request_queue_time_seconds", "Wait for a turn here", buckets=LATENCY_BUCKETS, registry=registry
        )
        self.first_token = Histogram(
            "headwater_time_to_first_token_seconds",
            "Arrival to first token",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.whole = Histogram(
            "headwater_e2e_request_latency_seconds", "Arrival to last token", buckets=LATENCY_BUCKETS, registry=registry
        )
        self.between_tokens = TokenLatency(
            "headwater_inter_token_latency_seconds", "Between a choice's pieces", TOKEN_BUCKETS
        )
        registry.register(self.between_tokens)
