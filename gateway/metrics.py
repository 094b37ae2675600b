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
    """Requests that wait for their turn, by tier; tiers where nobody waits are left out, but for the usual one."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[int, int]] = dict

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "headwater_admission_queue_length", "Requests that wait for their turn", labels=["tier"]
        )
        for tier, length in sorted({0: 0, **self.read()}.items()):
            family.add_metric([str(tier)], length)
        yield family


class ModelDemand(Collector):
    """Requests by model: what an autoscaler looks at. A model that nobody asks for is told too, with zero."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, tuple[int, int]]] = dict

    def collect(self) -> Iterator[GaugeMetricFamily]:
        here = GaugeMetricFamily("headwater_model_requests", "Requests that wait or run", labels=["model_name"])
        without = GaugeMetricFamily(
            "headwater_model_requests_without_replica",
            "Requests that wait because no replica of their model is there",
            labels=["model_name"],
        )
        for model, (num_requests, num_without) in sorted(self.read().items()):
            here.add_metric([model], num_requests)
            without.add_metric([model], num_without)
        yield from (here, without)


LENGTH_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
MAX_TENANTS = 1000
"""With counters of their own: where tenants name themselves, their number has no bound."""
OTHER_TENANTS = "others"
TOKEN_KINDS = ("prompt", "cached", "output")


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
        self.migrations = Counter(
            "headwater_migrations", "Answers that went on elsewhere, by cause", ["cause"], registry=registry
        )
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
        self._tenants: dict[str, tuple[Counter, ...]] = {}
        self._models: dict[str, ModelMetrics] = {}

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
        self.demand = ModelDemand()
        registry.register(self.queue)
        registry.register(self.demand)

    def of(self, model: str) -> ModelMetrics:
        """Of a model that is served."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]

    def count(self, generation: Generation) -> None:
        """A prompt that has ended, well or not."""
        each, road, num_output_tokens = self.of(generation.job.model), generation.road, generation.num_output_tokens
        each.whole.observe(road.seconds)
        each.prompt_length.observe(generation.num_prompt_tokens)
        each.answer_length.observe(num_output_tokens)
        if road.ttft is not None and num_output_tokens > 1:
            each.per_token.observe((road.seconds - road.ttft) / (num_output_tokens - 1))
        counts = (generation.num_prompt_tokens, generation.cached_tokens, num_output_tokens)
        tokens = (each.prompt_tokens, each.cached_tokens, each.generation_tokens)
        tenant = self._tokens_of(generation.job.caller.tenant.id)
        for count, by_model, by_tenant in zip(counts, tokens, tenant, strict=True):
            by_model.inc(count)
            by_tenant.inc(count)

    def _tokens_of(self, tenant: str) -> tuple[Counter, ...]:
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHER_TENANTS
        if tenant not in self._tenants:
            self._tenants[tenant] = tuple(self.tenant_tokens.labels(tenant, kind) for kind in TOKEN_KINDS)
        return self._tenants[tenant]


class ModelMetrics:
    """One model's, looked up once: a label costs more than what it counts."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.queue_time = metrics.queue_time.labels(model)
        self.first_token = metrics.first_token.labels(model)
        self.whole = metrics.whole.labels(model)
        self.per_token = metrics.per_token.labels(model)
        self.prompt_length = metrics.prompt_length.labels(model)
        self.answer_length = metrics.answer_length.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.generation_tokens = metrics.generation_tokens.labels(model)
        self._metrics, self._model = metrics, model
        self._finished: dict[str, Counter] = {}

    def finished(self, reason: str) -> Counter:
        if reason not in self._finished:
            self._finished[reason] = self._metrics.finished.labels(self._model, reason)
        return self._finished[reason]
