"""The gateway's metrics, with vLLM's names, meanings and labels where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..counters import LabelledCounter, LabelledGauges, LabelledHistogram
from ..tenancy.tenants import Tenant

LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
TOKEN_BUCKETS = (
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    5,
)


QUEUE = {"headwater_admission_queue_length": "Requests that wait for their turn"}
DEMAND = {
    "headwater_model_requests": "Requests that wait or run",
    "headwater_model_requests_without_replica": "Requests that wait because no replica of their "
    "model is there",
}


class WithoutTenants(Collector):
    """Families of a registry that name no tenants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if not any("tenant" in sample.labels for sample in family.samples):
                yield family


LENGTH_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
MAX_TENANTS = 1000
"""Tenants with counters of their own. Where tenants name themselves, their number has no bound."""
OTHER_TENANTS = "others"
MAX_ADAPTERS = 200
"""Names of adapters with counters of their own."""
OTHER_ADAPTERS = "others"
"""Metric label of adapters past the label limit, and of adapters whose name other tenants must not
learn."""


class TenantUse(msgspec.Struct):
    """Tokens of one tenant since the gateway started. Labels of metrics are names, which may be
    given again."""

    name: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Metrics:
    """Metrics of one gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.running = Gauge(
            "headwater_num_requests_running", "Requests that have their turn", registry=registry
        )
        self.waiting = Gauge(
            "headwater_num_requests_waiting", "Requests that wait for their turn", registry=registry
        )
        self.connections = Gauge(
            "headwater_num_connections", "Connections of clients over REST", registry=registry
        )
        self.streams = Gauge(
            "headwater_num_streams", "Choices open at output processors", registry=registry
        )

        self.responses = self._counter(
            "http_responses", "HTTP answers by path and status", "path", "status"
        )
        self.finished = self._counter(
            "request_success", "Choices that ended, by reason", "model_name", "finished_reason"
        )
        self.refused = self._counter("requests_refused", "Requests refused, by code", "code")
        self.retries = self._counter("dispatch_retries", "Dispatches after a failed one")
        self.hand_overs = self._counter(
            "hand_overs", "Answers that went on elsewhere behind their prompts, as planned"
        )
        self.migrations = self._counter(
            "migrations", "Answers that went on elsewhere, by cause", "cause"
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of dispatched requests", "model_name"
        )
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Of these, found in the KV cache", "model_name"
        )
        self.generation_tokens = self._counter(
            "generation_tokens", "Tokens delivered", "model_name"
        )
        kinds = "Tokens by tenant: of prompts, of these found in the cache, and of answers"
        self.tenant_tokens = self._counter("tenant_tokens", kinds, "tenant", "kind")
        self.adapter_requests = self._counter(
            "adapter_requests", "Prompts that ended, by adapter", "adapter"
        )
        self._adapters: set[str] = set()
        self._tenants: set[str] = set()
        self.tenant_use: dict[str, TenantUse] = {}
        """Keyed by the tenant's key; of the first so many tenants."""
        self._models: dict[str, ModelMetrics] = {}

        self.queue_time = self._distribution(
            "request_queue_time_seconds", "Wait for a turn here", LATENCY_BUCKETS
        )
        self.policy_queue_time = LabelledHistogram(
            "headwater_policy_queue_time_seconds",
            "Wait for a turn here, by queue policy",
            LATENCY_BUCKETS,
            ("policy",),
            registry=self.registry,
        )
        self.late = self._counter(
            "policy_refusals", "Requests refused because they would be late", "policy"
        )
        self.first_token = self._distribution(
            "time_to_first_token_seconds", "Arrival to first token", LATENCY_BUCKETS
        )
        self.whole = self._distribution(
            "e2e_request_latency_seconds", "Arrival to last token", LATENCY_BUCKETS
        )
        self.per_token = self._distribution(
            "request_time_per_output_token_seconds",
            "A request's mean time a token after its first",
            TOKEN_BUCKETS,
        )
        self.prompt_length = self._distribution(
            "request_prompt_tokens", "Tokens of a prompt", LENGTH_BUCKETS
        )
        self.answer_length = self._distribution(
            "request_generation_tokens", "Tokens of an answer", LENGTH_BUCKETS
        )
        self.between_tokens = self._distribution(
            "inter_token_latency_seconds", "Between a choice's pieces", TOKEN_BUCKETS
        )
        self.queued_by_tier: Callable[[], Mapping[int, int]] = dict
        """Reads the number of requests that wait for their turn. Tiers without any are left out,
        except the usual."""
        self.demand: Callable[[], Mapping[str, tuple[int, int]]] = dict
        """Reads the numbers of `DEMAND` by model, for an autoscaler. A model without requests has
        zeros."""
        registry.register(LabelledGauges("tier", QUEUE, self._queue_lengths))
        registry.register(
            LabelledGauges("model_name", DEMAND, lambda: sorted(self.demand().items()))
        )

    def _queue_lengths(self) -> list[tuple[str, list[int]]]:
        return [
            (str(tier), [length])
            for tier, length in sorted({0: 0, **self.queued_by_tier()}.items())
        ]

    def _counter(self, name: str, documentation: str, *labels: str) -> LabelledCounter:
        return LabelledCounter(f"headwater_{name}", documentation, labels, registry=self.registry)

    def _distribution(
        self, name: str, documentation: str, bounds: Sequence[float]
    ) -> LabelledHistogram:
        name = f"headwater_{name}"
        return LabelledHistogram(
            name, documentation, bounds, ("model_name",), registry=self.registry
        )

    def page(self, *, with_tenants: bool) -> bytes:
        """Page for Prometheus; without tenants for callers that may not see others."""
        return generate_latest(self.registry if with_tenants else WithoutTenants(self.registry))

    def of(self, model: str) -> ModelMetrics:
        """Metrics of a served model."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]

    def queued(self, model: str, policy: str, seconds: float) -> None:
        """Counts a prompt whose turn has come."""
        self.of(model).queue_time(seconds)
        self.policy_queue_time.of(policy)(seconds)

    def count(
        self,
        model: str,
        tenant: Tenant,
        *,
        seconds: float,
        ttft: float | None,
        num_prompt_tokens: int,
        cached_tokens: int,
        num_output_tokens: int,
    ) -> None:
        """Counts a prompt that has ended, well or not. `ttft`: seconds to its first token."""
        each = self.of(model)
        each.whole(seconds)
        each.prompt_length(num_prompt_tokens)
        each.answer_length(num_output_tokens)
        if ttft is not None and num_output_tokens > 1:
            each.per_token((seconds - ttft) / (num_output_tokens - 1))
        self.prompt_tokens.add(model, by=num_prompt_tokens)
        self.cached_tokens.add(model, by=cached_tokens)
        self.generation_tokens.add(model, by=num_output_tokens)
        self._count_tenant(tenant.id, num_prompt_tokens, cached_tokens, num_output_tokens)
        if tenant.key in self.tenant_use or len(self.tenant_use) < MAX_TENANTS:
            use = self.tenant_use.setdefault(tenant.key, TenantUse(tenant.id))
            use.prompt_tokens += num_prompt_tokens
            use.cached_tokens += cached_tokens
            use.output_tokens += num_output_tokens

    def count_adapter(self, name: str) -> None:
        """Counts a prompt with an adapter that has ended, well or not."""
        if name not in self._adapters and name != OTHER_ADAPTERS:
            if len(self._adapters) < MAX_ADAPTERS:
                self._adapters.add(name)
            else:
                name = OTHER_ADAPTERS
        self.adapter_requests.add(name)

    def _count_tenant(
        self, tenant: str, num_prompt_tokens: int, cached_tokens: int, num_output_tokens: int
    ) -> None:
        if tenant not in self._tenants:
            if len(self._tenants) < MAX_TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = OTHER_TENANTS
        self.tenant_tokens.add(tenant, "prompt", by=num_prompt_tokens)
        self.tenant_tokens.add(tenant, "cached", by=cached_tokens)
        self.tenant_tokens.add(tenant, "output", by=num_output_tokens)


class ModelMetrics:
    """One model's distributions, looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.queue_time = metrics.queue_time.of(model)
        self.first_token = metrics.first_token.of(model)
        self.whole = metrics.whole.of(model)
        self.per_token = metrics.per_token.of(model)
        self.prompt_length = metrics.prompt_length.of(model)
        self.answer_length = metrics.answer_length.of(model)
        self.between_tokens = metrics.between_tokens.of(model)
