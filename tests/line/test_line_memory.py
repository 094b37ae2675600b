"""Replicas of one machine share their weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.line.conftest import DEMO_ENV, KV_CACHE_BYTES, Line, LineStarter

BOUND = KV_CACHE_BYTES + (448 << 20)
"""Of a replica's server and core together. Measured beside the cache: 362 MiB of a new cluster
(server 91, torch 150, weights in the layout of its library 90), 388 MiB of one that has answered
other tests, grammars among them."""


def private_bytes(pid: int) -> int:
    """Memory that nobody can share. NOTE: pages of a mapped file are clean, and shared with whoever
    maps it too."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Private_Dirty"))


def bytes_of_weights(pids: list[int]) -> Counter[str]:
    """Bytes of the processes' mappings of weights, by the kernel's names of their kinds."""
    found: Counter[str] = Counter()
    is_weights = False
    for pid in pids:
        for row in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            first, *others = row.split()
            if not first.endswith(":"):
                is_weights = row.endswith((".safetensors", ".bin"))
            elif is_weights and others[-1] == "kB":
                found[first.removesuffix(":")] += int(others[0]) << 10
    return found


def replicas_of(line: Line) -> tuple[list[int], list[int]]:
    """Processes of both, when they have answered."""
    for idx in range(2):
        line.chat([{"role": "user", "content": f"{idx}: warm up, please."}])
    return line.pids_of("engine-0"), line.pids_of("engine-1")


@pytest.mark.slow
@pytest.mark.long
def test_a_second_replica_maps_the_weights_of_the_first(demo_line: Line) -> None:
    first, second = map(bytes_of_weights, replicas_of(demo_line))
    assert first["Private_Dirty"] + second["Private_Dirty"] == 0
    assert min(first["Rss"], second["Rss"]) > 64 << 20
    # A page that both map is half of each.
    assert first["Pss"] + second["Pss"] < 1.1 * max(first["Rss"], second["Rss"])


@pytest.mark.long
def test_a_replica_that_starts_as_in_a_deployment_takes_little_beside_weights_and_cache(
    start_line: LineStarter,
) -> None:
    for replica in replicas_of(start_line("--replicas=2", env=DEMO_ENV)):
        assert sum(map(private_bytes, replica)) < BOUND
