"""Replicas of one machine share their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def private_bytes(pid: int) -> int:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith(("Private_Clean", "Private_Dirty")))


@pytest.mark.slow
def test_a_second_replica_maps_the_weights_of_the_first(demo_line: Any) -> None:
    demo_line.chat([{"role": "user", "content": "Warm up, please."}])
    replicas = [demo_line.pids_of(name) for name in ("engine-0", "engine-1")]
    private = [sum(private_bytes(pid) for pid in pids) for pids in replicas]
    print(private)
    assert private[1] < 700 << 20
