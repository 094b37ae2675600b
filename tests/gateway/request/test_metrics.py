"""What a gateway counts, where it is not seen through a whole line."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headwater.gateway.request.admission import Admission
from headwater.gateway.request.metrics import MAX_ADAPTERS, MAX_TENANTS, OTHER_ADAPTERS, Metrics


def shown(registry: CollectorRegistry, name: str) -> list[str]:
    return [
        line for line in generate_latest(registry).decode().splitlines() if line.startswith(name)
    ]


async def test_waiting_requests_are_counted_by_tier() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    admission = Admission(max_running=1, max_queued=10)
    metrics.queued_by_tier = lambda: admission.queued_by_tier
    assert shown(registry, "headwater_admission") == [
        'headwater_admission_queue_length{tier="0"} 0.0'
    ]

    async def run(tier: int) -> None:
        with await admission.take(tier):
            await asyncio.sleep(3600)

    tasks = [asyncio.create_task(run(tier)) for tier in (0, 7, 0, 7)]
    await asyncio.sleep(0)
    assert shown(registry, "headwater_admission") == [
        'headwater_admission_queue_length{tier="0"} 1.0',
        'headwater_admission_queue_length{tier="7"} 2.0',
    ]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.queued_by_tier == {}


def test_time_between_tokens_is_measured_by_model() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.of("a").between_tokens(0.0021)
    metrics.of("a").between_tokens(0.2)
    metrics.of("b").between_tokens(9.0)
    name = "headwater_inter_token_latency_seconds"
    assert shown(registry, f"{name}_count") == [
        f'{name}_count{{model_name="a"}} 2.0',
        f'{name}_count{{model_name="b"}} 1.0',
    ]
    assert f'{name}_bucket{{le="0.003",model_name="a"}} 1.0' in shown(registry, f"{name}_bucket")
    assert f'{name}_bucket{{le="5",model_name="b"}} 0.0' in shown(registry, f"{name}_bucket")


def test_tenants_that_name_themselves_do_not_grow_the_page_for_ever() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for number in range(MAX_TENANTS + 100):
        metrics._count_tenant(f"tenant-{number}", 1, 0, 0)
    lines = [
        line for line in shown(registry, "headwater_tenant_tokens_total") if 'kind="prompt"' in line
    ]
    assert len(lines) == MAX_TENANTS + 1
    assert 'headwater_tenant_tokens_total{kind="prompt",tenant="others"} 100.0' in lines


@pytest.mark.parametrize("name", ["time_to_first_token_seconds", "e2e_request_latency_seconds"])
def test_latencies_below_ten_milliseconds_have_several_buckets(name: str) -> None:
    registry = CollectorRegistry()
    Metrics(registry).of("m")
    bounds = shown(registry, f"headwater_{name}_bucket")
    assert sum(float(line.split('le="')[1].split('"')[0]) < 0.01 for line in bounds) >= 3


def test_adapters_beyond_the_bound_share_a_counter() -> None:
    metrics = Metrics(CollectorRegistry())
    for i in range(MAX_ADAPTERS + 3):
        metrics.count_adapter(f"adapter {i}")
    metrics.count_adapter("adapter 0")
    assert metrics.adapter_requests.value("adapter 0") == 2
    assert metrics.adapter_requests.value(OTHER_ADAPTERS) == 3
    assert metrics.adapter_requests.value(f"adapter {MAX_ADAPTERS}") == 0
