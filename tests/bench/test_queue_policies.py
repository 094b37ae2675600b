"""The benchmark of queue policies: its loads, its clock and its figures, in small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headwater.bench.queue_loads import MAX_ANSWER, Arrival, at_rate, documents, traced, within
from headwater.bench.queue_machine import Machine
from headwater.bench.queue_policies import jain_of, measure
from headwater.bench.queue_run import Outcome
from headwater.gateway.tenancy.tenants import Tenant
from headwater.gateway.tenancy.virtual_time import VirtualTime
from headwater.services.runtime.store import Store


def outcome(tenant: str, *, num_tokens: int, is_refused: bool = False) -> Outcome:
    arrival = Arrival(
        key=0,
        at=0.0,
        tenant=tenant,
        prompt=list,
        num_prompt_tokens=num_tokens,
        num_answer_tokens=0,
    )
    share = VirtualTime(Store(None)).request(Tenant(id=tenant), 1, 1)
    return Outcome(arrival=arrival, share=share, is_refused=is_refused)


@pytest.mark.long
def test_policies_are_measured_beside_order_of_arrival() -> None:
    """A few documents among seventy chats; everything happens on a virtual clock, so that the
    figures are the same each time."""
    load = documents(70, np.random.default_rng(0))
    rows = list(
        measure("documents", load, [0.9], ["srpt", "slo"], Machine("", "auto", 256, 2048), print)
    )
    fcfs, srpt, slo = rows
    assert (fcfs.policy, fcfs.ttft_x, fcfs.good_x, fcfs.refused) == ("fcfs", 1.0, 1.0, 0)
    assert srpt.ttft_x < 0.6
    assert srpt.long_p99_x < 2
    assert slo.refused > 0
    assert slo.good > fcfs.good


def test_a_trace_has_its_prefixes_and_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 9999, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = traced(path, 10)
    assert (first.at, second.at) == (0.0, 3.0)
    assert (len(first.prompt()), len(second.prompt())) == (1000, 1024)
    assert first.prompt()[:512] == second.prompt()[:512]
    assert first.prompt()[512:600] != second.prompt()[512:600]
    assert (first.num_answer_tokens, second.num_answer_tokens) == (MAX_ANSWER, 5)
    assert [each.at for each in at_rate([first, second], 4.0)] == [0.0, 0.5]
    cut = within([first, second], MAX_ANSWER + 600)
    assert [len(each.prompt()) for each in cut] == [600, 600]
    assert [each.num_prompt_tokens for each in cut] == [600, 600]


def test_shares_are_judged_by_what_each_tenant_asked_for() -> None:
    asked = [outcome("a", num_tokens=100), outcome("b", num_tokens=1000)]
    assert jain_of(asked) == pytest.approx(1.0), "each got all it asked for"
    starved = [outcome("a", num_tokens=100, is_refused=True), outcome("b", num_tokens=100)]
    assert jain_of(starved) < 0.75
