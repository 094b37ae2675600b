from __future__ import annotations

from pathlib import Path

import torch

from headwater.bench import kv_tiers


def test_blocks_come_back_from_the_disk_and_both_rates_are_reported(tmp_path: Path) -> None:
    blocks = kv_tiers.kv_blocks(
        "qwen3-0.6b", num_blocks=6, block_size=1, device=torch.device("cpu")
    )
    swapper = kv_tiers.swapper_of(blocks, 6)
    before = blocks.memory.clone()
    read, written = kv_tiers.disk_rates(swapper, tmp_path, 6, 1, runs=1)
    assert torch.equal(blocks.memory, before)
    assert len(list(tmp_path.rglob("0*"))) >= 6
    assert read["share"] > 0
    assert read["gb_per_s"] >= 0
    assert written["gb_per_s"] >= 0
