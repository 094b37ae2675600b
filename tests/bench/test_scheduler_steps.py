from __future__ import annotations

from headwater.bench.scheduler_steps import WORKLOADS, Measurement, measure

IN_VAIN = "steady decode, drafts looked for in vain"


def test_every_workload_is_measured_and_keeps_its_requests_running() -> None:
    measured = [
        measure(workload, num_running=8, async_depth=2, block_size=16, steps_per_round=20)
        for workload in WORKLOADS
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
