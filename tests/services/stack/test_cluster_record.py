from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from headwater.services.stack.cluster_record import ClusterRecord, read_cluster, remove_cluster


def test_a_line_is_found_while_it_runs_and_not_after_it_was_killed(tmp_path: Path) -> None:
    assert read_cluster(tmp_path) is None
    record = ClusterRecord(
        pid=os.getpid(),
        model="m",
        rest="http://h:1",
        grpc="h:2",
        nats_url="n",
        redis_url="r",
        stages=(),
    )
    record.write(tmp_path)
    assert read_cluster(tmp_path) == record
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    dataclasses.replace(record, pid=ended.pid).write(tmp_path)
    assert read_cluster(tmp_path) is None
    remove_cluster(tmp_path)
    assert list(tmp_path.iterdir()) == []
