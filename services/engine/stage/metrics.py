"""Metrics of an engine; names and meanings follow vLLM's. The collector reads the server at each
scrape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import REGISTRY, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from headwater.engine_core.expert_figures import ExpertFigures
from headwater.engine_core.parallel.rank_facts import RankFigures
from headwater.engine_core.step_output import EngineLoad

from ..core.figures import CoreFigures
from .adapters import EngineAdapters

_SECONDS = (
    0.0003,
    0.0006,
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1,
    2,
    4,
    8,
    16,
    32,
)


def _distribution(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
    return Histogram(name, text, ["model_name"], buckets=buckets)


STEP_SECONDS = _distribution("headwater_step_seconds", "Time of an engine step")
QUEUE_SECONDS = _distribution(
    "headwater_request_queue_time_seconds", "Time that a request waited before its first step"
)
POLICY_QUEUE_SECONDS = Histogram(
    "headwater_policy_queue_time_seconds",
    "Time that a request waited before its first step, by queue policy",
    ["model_name", "policy"],
    buckets=_SECONDS,
)
PREFILL_SECONDS = _distribution(
    "headwater_request_prefill_time_seconds", "Time from a request's first step to its first token"
)
DECODE_SECONDS = _distribution(
    "headwater_request_decode_time_seconds", "Time from a stream's first token to its last"
)
MASK_SECONDS = _distribution(
    "headwater_mask_seconds",
    "Time to write the masks of a step, from its tokens to the core's notice",
)
STEP_TOKENS = _distribution(
    "headwater_iteration_tokens_total",
    "Tokens computed in a step",
    tuple(2**power for power in range(0, 17, 2)),
)


class Measured(Protocol):
    """Attributes of the server that the collector reads."""

    num_prompt_tokens: int

    @property
    def num_finished(self) -> Mapping[str, int]: ...
    @property
    def totals(self) -> EngineLoad: ...
    @property
    def is_prepared(self) -> bool: ...
    @property
    def core_figures(self) -> CoreFigures: ...
    @property
    def cache_config(self) -> Mapping[str, str]: ...
    @property
    def adapters(self) -> EngineAdapters: ...


class EngineCollector(Collector):
    def __init__(self, server: Measured, model_name: str) -> None:
        self._server = server
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        load = self._server.totals
        usage = load.num_used_blocks / load.num_total_blocks if load.num_total_blocks else 0.0
        yield self._gauge("num_requests_running", "Requests being computed", load.num_running)
        yield self._gauge("num_requests_waiting", "Requests not yet started", load.num_waiting)
        config = InfoMetricFamily("headwater_cache_config", "What the KV cache is")
        config.add_metric([], {"model_name": self._model_name, **self._server.cache_config})
        yield config
        used_slots = load.num_used_blocks * int(self._server.cache_config["block_size"])
        filled = 1 - load.num_wasted_slots / used_slots if used_slots else 1.0
        yield self._gauge(
            "kv_cache_utilisation",
            "Share of used blocks' slots that stand for a token, 0 to 1",
            filled,
        )
        yield self._labelled_gauge(
            "kv_cache_pages",
            "Pages in block tables of requests, by the window of their layers in tokens, 0: none; "
            "state: of layers that keep a state; snapshot: of cached states, those of requests "
            "included",
            "window",
            load.num_pages_by_window,
        )
        yield self._labelled_gauge(
            "kv_cache_bytes",
            "Bytes of pages in block tables of requests, by kind of layer: full, window, latent, "
            "state; snapshot: of cached states, those of requests included",
            "kind",
            load.kv_bytes,
        )
        yield self._labelled_gauge(
            "kv_cache_wasted_bytes",
            "Bytes of these pages that hold nothing: what pads them, and slots behind the last "
            "tokens of requests",
            "window",
            load.wasted_bytes,
        )
        yield self._gauge(
            "kv_kept_blocks", "Cached blocks that a hint of a client keeps", load.num_kept_blocks
        )
        yield self._counter(
            "kv_copied_blocks", "Partly filled blocks copied for forks", load.num_copied_blocks
        )
        yield self._gauge(
            "kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1", usage
        )
        swapped = (
            load.num_used_host_blocks / load.num_total_host_blocks
            if load.num_total_host_blocks
            else 0.0
        )
        yield self._gauge(
            "kv_swap_usage_perc",
            "Share of KV blocks in host memory that hold a copy, 0 to 1",
            swapped,
        )
        yield self._gauge(
            "engine_held_bytes",
            "Bytes of weights that stay on the device when the engine dies",
            load.num_held_bytes,
        )
        if load.can_sleep:
            yield from self._sleep(load)
        is_prepared = float(self._server.is_prepared)
        yield self._gauge(
            "engine_prepared",
            "1 once no step waits for kernels or graphs that it needs",
            is_prepared,
        )
        yield self._counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            load.prefix_queries,
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache", load.prefix_hits
        )
        yield self._counter(
            "kv_swap_out_tokens", "Tokens copied to host memory", load.num_swapped_out
        )
        yield self._counter(
            "kv_swap_in_tokens", "Tokens that came back from host memory", load.num_swapped_in
        )
        yield from self._tiers(load)
        yield from self._speculation(load)
        yield from self._ranks(self._server.core_figures.ranks)
        yield from self._adapters(self._server.adapters)
        yield from self._experts(self._server.core_figures.experts)
        yield self._counter(
            "num_preemptions", "Requests that gave up their blocks", load.num_preemptions
        )
        resumed = {
            "kept": load.num_resumed_kept,
            "loaded": load.num_resumed_loaded,
            "computed": load.num_resumed_computed,
        }
        yield self._labelled(
            "resumed_tokens", "Tokens of preempted requests that run again, by way", "way", resumed
        )
        yield self._counter(
            "prompt_tokens", "Prompt tokens of requests taken", self._server.num_prompt_tokens
        )
        yield self._counter("generation_tokens", "Tokens generated", load.num_generated_tokens)
        finished = self._server.num_finished
        yield self._labelled(
            "request_success", "Streams that ended, by reason", "finished_reason", finished
        )

    def _speculation(self, load: EngineLoad) -> Iterator[Metric]:
        yield self._counter(
            "spec_decode_num_drafts", "Drafts verified, of one request in one step", load.num_drafts
        )
        yield self._counter(
            "spec_decode_num_draft_tokens", "Drafted tokens verified", load.num_draft_tokens
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens accepted", load.num_accepted_tokens
        )
        yield self._labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by position in their draft",
            "position",
            {str(position): count for position, count in enumerate(load.num_accepted_by_position)},
        )
        yield self._gauge(
            "spec_decode_drafter_bytes", "Memory that drafters hold", load.num_drafter_bytes
        )

    def _ranks(self, figures: Sequence[RankFigures]) -> Iterator[Metric]:
        """Metrics of ranks; none of an engine without ranks."""
        families = {
            "rank_plans": ("Steps and draws that a rank computed", "num_plans"),
            "rank_busy_seconds": ("Time of a rank in them", "busy_seconds"),
            "rank_wait_seconds": (
                "Time of it for which a rank waited for others",
                "waited_seconds",
            ),
        }
        for name, (text, field) in families.items() if figures else ():
            values = {str(rank): getattr(each, field) for rank, each in enumerate(figures)}
            yield self._labelled(name, text, "rank", values)

    def _adapters(self, adapters: EngineAdapters) -> Iterator[Metric]:
        yield self._gauge(
            "adapter_host_bytes", "Host memory that adapters take, in bytes", adapters.num_bytes
        )
        yield self._counter(
            "adapter_evictions", "Adapters that left host memory for others", adapters.num_evicted
        )

    def _experts(self, figures: ExpertFigures | None) -> Iterator[Metric]:
        """Metrics of experts; none of a model without experts."""
        if figures is None:
            return
        yield self._labelled(
            "expert_rows",
            "Tokens that chose an expert, by its index, over all layers",
            "expert",
            {str(expert): count for expert, count in enumerate(figures.num_rows)},
        )
        yield self._labelled_gauge(
            "expert_largest_share",
            "Share of a layer's rows that its most chosen expert has, 0 to 1, by number among the "
            "layers with experts",
            "layer",
            {str(layer): share for layer, share in enumerate(figures.largest_shares)},
        )
        yield self._gauge(
            "step_experts", "Experts that a recent step read, over all layers", figures.num_read
        )
        yield self._gauge(
            "step_expert_bytes", "Bytes of their weights, as stored", figures.num_bytes_read
        )

    def _tiers(self, load: EngineLoad) -> Iterator[Metric]:
        hits = load.hits_by_tier
        hits = {"device": load.prefix_hits - sum(hits.values()), **hits}
        yield self._labelled(
            "prefix_cache_hits_by_tier",
            "Prompt tokens found cached, by where they were",
            "tier",
            hits,
        )
        yield from self._peers(load)
        if (disk := load.disk) is None:
            return
        yield self._gauge(
            "kv_disk_on",
            "1 while blocks are written to the disk and read from it",
            not disk.failure,
        )
        yield self._gauge(
            "kv_disk_usage_perc",
            "Share of the disk's bytes in use, 0 to 1",
            disk.num_bytes / disk.max_bytes,
        )
        yield self._gauge("kv_disk_blocks", "KV blocks on the disk", disk.num_blocks)
        yield self._counter("kv_disk_out_tokens", "Tokens written to the disk", disk.num_written)
        yield self._counter("kv_disk_in_tokens", "Tokens read from the disk", disk.num_read)
        yield self._counter(
            "kv_disk_damaged_blocks", "KV blocks whose files were gone or torn", disk.num_damaged
        )

    def _peers(self, load: EngineLoad) -> Iterator[Metric]:
        if (peers := load.peers) is None:
            return
        yield self._counter(
            "kv_pulled_tokens", "Tokens pulled from other engines", peers.num_pulled
        )
        yield self._counter(
            "kv_prefetched_tokens",
            "Pulled tokens that came before their request did",
            peers.num_prefetched,
        )
        yield self._counter("kv_lent_tokens", "Tokens copied for other engines", peers.num_lent)
        yield self._counter(
            "kv_pulled_directly_tokens",
            "Pulled tokens that were copied out of another KV cache",
            peers.num_direct,
        )
        yield self._counter(
            "kv_lent_from_tiers_tokens",
            "Lent tokens from host memory or the disk",
            peers.num_lent_from_tiers,
        )
        yield self._counter(
            "kv_pull_discarded_blocks",
            "KV blocks asked of other engines that did not come whole",
            peers.num_discarded,
        )
        yield self._gauge("kv_leases", "Leases of other engines on KV blocks", peers.num_leases)

    def _sleep(self, load: EngineLoad) -> Iterator[Metric]:
        yield self._gauge(
            "engine_asleep", "1 while the engine sleeps", load.sleep_state == "asleep"
        )
        yield self._gauge(
            "engine_released_bytes", "Bytes of the device given back", load.num_released_bytes
        )
        yield self._counter("engine_sleeps", "Times that the engine slept", load.num_sleeps)
        yield self._gauge(
            "engine_sleep_seconds", "Time that the last fall asleep took", load.sleep_seconds
        )
        yield self._gauge("engine_wake_seconds", "Time that the last wake took", load.wake_seconds)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily, name, text, {"": value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily, name, text, {"": value})

    def _labelled_gauge(
        self, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        return self._filled(GaugeMetricFamily, name, text, values, label)

    def _labelled(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        return self._filled(CounterMetricFamily, name, text, counts, label)

    def _filled(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        *label: str,
    ) -> Metric:
        """A family of samples by the values of `label`, if there is one, and by model."""
        family = kind(f"headwater_{name}", text, labels=["model_name", *label])
        for value, sample in values.items():
            family.add_metric([self._model_name, value][: 1 + len(label)], sample)
        return family


@contextlib.contextmanager
def collected(server: Measured, model_name: str) -> Iterator[None]:
    """Registers the server's metrics of this process, inside the `with` block."""
    collector = EngineCollector(server, model_name)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
