"""Prefixes on a disk, of a cluster that is stopped and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_cluster import ForkedCluster
from tests.line.conftest import MODEL, Line

PROMPTS = [f"{word} " * 200 for word in ("river", "hill", "sea")]


@pytest.mark.long
def test_prefixes_on_a_disk_are_found_when_the_whole_cluster_was_restarted(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    found = []
    keys = []
    for life in range(2):
        flags = ("--executor=simulated", "--replicas=1", f"--kv-disk-dir={tmp_path / 'kv'}")
        # Prompts that take longer to compute than to read.
        env = {"HEADWATER_SIMULATED_PREFILL_SECONDS": "0.003"}
        with Line(
            state_dir, *flags, env=env, log_name=f"up-{life}.log", start=ForkedCluster
        ) as line:
            for prompt in PROMPTS:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
                usage = line.client.post("/v1/completions", json=body).json()["usage"]
                found.append(usage["prompt_tokens_details"]["cached_tokens"])
            keys.append((state_dir / "master.key").read_bytes())
            assert line.stop() == 0
    assert found[:3] == [0, 0, 0]
    # The engine looks through its folder beside its first steps.
    assert found[-1] >= 192
    assert keys[0] == keys[1]
