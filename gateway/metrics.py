"""What the gateway counts. Names, meanings and labels as vLLM's where it has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from headwater.gateway.session import Generation

LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
TOKEN_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)


class _Counts:
    """Of one label: `observe` is one search and two additions, without a lock or a label look-up."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class TokenLatency(Collector):
    """A histogram by model for the token path."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._models: dict[str, _Counts] = {}

    def of(self, model: str) -> Callable[[float], None]:
        """What observes seconds of a model that is served."""
        if model not in self._models:
            self._models[model] = _Counts(self._bounds)
        return self._models[model].observe

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model_name"])
        names = [*map(str, self._bounds), "+Inf"]
        for model, each in self._models.items():
            buckets = list(zip(names, map(float, accumulate(each.counts)), strict=True))
            family.add_metric([model], buckets=buckets, sum_value=each.sum)
        yield family


class QueueLengths(Collector):
    """Requests that wait for their turn, by tier; tiers where nobody waits are left out."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[int, int]] = dict

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "headwater_admission_queue_length", "Requests that wait for their turn", labels=["tier"]
        )
        for tier, length in sorted(self.read().items()):
            family.add_metric([str(tier)], length)
        yield family


LENGTH_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
MAX_TENANTS = 1000
"""With counters of their own: where tenants name themselves, their number has no bound."""
OTHER_TENANTS = "others"


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
        self.tenant_tokens = Counter(
            "headwater_tenant_tokens",
            "Tokens by tenant: of prompts, of these found in the cache, and of answers",
            ["tenant", "kind"],
            registry=registry,
        )
        self._tenants: set[str] = set()

        def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"headwater_{name}", documentation, ["model_name"], buckets=buckets, registry=registry)

        self.queue_time = histogram("request_queue_time_seconds", "Wait for a turn here", LATENCY_BUCKETS)
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token", LATENCY_BUCKETS)
        self.whole = histogram("e2e_request_latency_seconds", "Arrival to last token", LATENCY_BUCKETS)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "A request's mean time a token after its first", TOKEN_BUCKETS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt", LENGTH_BUCKETS)
        self.answer_length = histogram("request_generation_tokens", "Tokens of an answer", LENGTH_BUCKETS)
        self.between_tokens = TokenLatency(
            "headwater_inter_token_latency_seconds", "Between a choice's pieces", TOKEN_BUCKETS
        )
        self.queue = QueueLengths()
        registry.register(self.between_tokens)
        registry.register(self.queue)

    def count(self, generation: Generation) -> None:
        """A prompt that has ended, well or not."""
        model, road, num_output_tokens = generation.job.model, generation.road, generation.num_output_tokens
        self.whole.labels(model).observe(road.seconds)
        self.prompt_tokens.labels(model).inc(generation.num_prompt_tokens)
        self.cached_tokens.labels(model).inc(generation.cached_tokens)
        self.generation_tokens.labels(model).inc(num_output_tokens)
        self.prompt_length.labels(model).observe(generation.num_prompt_tokens)
        self.answer_length.labels(model).observe(num_output_tokens)
        if road.ttft is not None and num_output_tokens > 1:
            self.per_token.labels(model).observe((road.seconds - road.ttft) / (num_output_tokens - 1))
        tenant = self._label_of(generation.job.caller.tenant.id)
        self.tenant_tokens.labels(tenant, "prompt").inc(generation.num_prompt_tokens)
        self.tenant_tokens.labels(tenant, "cached").inc(generation.cached_tokens)
        self.tenant_tokens.labels(tenant, "output").inc(num_output_tokens)

    def _label_of(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant
