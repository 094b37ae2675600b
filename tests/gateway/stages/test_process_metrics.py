"""Counts of processes that come back under their name."""

from __future__ import annotations

import dataclasses

from headwater.gateway.stages.process_metrics import MAX_KNOWN, StageRestarts
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Change, ChangeKind

ENGINE = Member(kind=Kind.ENGINE, replica_id="a", epoch=1, address="127.0.0.1:1")


def counted(restarts: StageRestarts) -> dict[str, float]:
    [family] = restarts.collect()
    return {sample.labels["replica"]: sample.value for sample in family.samples}


def test_a_process_counts_each_time_that_it_comes_back_and_another_one_does_not() -> None:
    restarts = StageRestarts()
    for replica_id, epoch in (("a", 1), ("b", 7), ("a", 2), ("a", 2), ("a", 3), ("seed", 0)):
        member = dataclasses.replace(ENGINE, replica_id=replica_id, epoch=epoch)
        restarts.follow(Change(ChangeKind.JOINED, member))
        restarts.follow(Change(ChangeKind.LEFT, member))
    assert counted(restarts) == {"a": 2, "b": 0}


def test_the_latest_processes_are_remembered() -> None:
    restarts = StageRestarts()
    for number in range(MAX_KNOWN + 2):
        member = dataclasses.replace(ENGINE, replica_id=str(number))
        restarts.follow(Change(ChangeKind.JOINED, member))
    assert len(counted(restarts)) == MAX_KNOWN
    assert "0" not in counted(restarts)
