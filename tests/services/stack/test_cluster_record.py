from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.services.cli.up import own_state_folder
from headwater.services.stack.cluster_record import (
    ClusterRecord,
    StageRecord,
    pid_of_stage,
    read_cluster,
    remove_cluster,
)
from headwater.services.stack.stack_error import StackError


def record_of(*stages: StageRecord) -> ClusterRecord:
    return ClusterRecord(
        pid=os.getpid(),
        model="m",
        rest="http://h:1",
        grpc="h:2",
        nats_url="n",
        redis_url="r",
        stages=stages,
    )


def test_a_line_is_found_while_it_runs_and_not_after_it_was_killed(tmp_path: Path) -> None:
    assert read_cluster(tmp_path) is None
    record = record_of()
    record.write(tmp_path)
    assert read_cluster(tmp_path) == record
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    dataclasses.replace(record, pid=ended.pid).write(tmp_path)
    assert read_cluster(tmp_path) is None
    remove_cluster(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stage_of_the_running_cluster_has_a_process_id(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"^no cluster runs with the state folder "):
        pid_of_stage(tmp_path, "engine-0")
    stage = StageRecord(name="engine-0", pid=12, addresses={})
    record_of(stage).write(tmp_path)
    assert pid_of_stage(tmp_path, "engine-0") == 12
    with pytest.raises(StackError, match=r"^name is 'engine-1'; allowed: engine-0$"):
        pid_of_stage(tmp_path, "engine-1")


def test_the_record_of_a_killed_cluster_is_gone_while_the_next_one_starts(tmp_path: Path) -> None:
    """In a container the next one may have the same process id, and is taken for the old one."""
    record_of().write(tmp_path)
    with own_state_folder(tmp_path):
        assert read_cluster(tmp_path) is None
