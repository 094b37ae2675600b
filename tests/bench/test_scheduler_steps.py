from __future__ import annotations

from headwater.bench.scheduler_steps import WORKLOADS, Measurement, measure
from headwater.engine_core.config import BY_VALUE, LRU

IN_VAIN = "steady decode, drafts looked for in vain"


def test_every_workload_is_measured_and_keeps_its_requests_running() -> None:
    measured = [
        each
        for workload in WORKLOADS
        for each in measure(
            workload, num_running=8, async_depth=2, block_size=16, steps_per_round=20
        )
    ]
    assert [each.workload for each in measured] == [workload.name for workload in WORKLOADS]
    assert all(
        isinstance(each, Measurement) and each.engine_us > 0 and each.executor_us > 0
        for each in measured
    )
    assert measured[0].admitted_per_step == 0
    assert measured[2].admitted_per_step > 0
    assert all(
        each.tokens_per_row == 1 for each in measured if each.workload in ("steady decode", IN_VAIN)
    )
    assert measured[4].tokens_per_row > 1


def test_orders_of_eviction_are_timed_in_turn_with_a_full_cache() -> None:
    lru, value = measure(
        WORKLOADS[2],
        num_running=8,
        async_depth=2,
        block_size=16,
        steps_per_round=120,
        evictions=(LRU, BY_VALUE),
    )
    assert (lru.eviction, value.eviction) == (LRU, BY_VALUE)
    assert lru.engine_of_first == 1.0
    assert value.engine_of_first > 0
    assert lru.evicted_per_step == value.evicted_per_step > 0
