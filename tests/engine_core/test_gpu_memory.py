"""What a GPU's memory is divided into, and what is said when it does not do."""

from __future__ import annotations

import pytest

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.executors.build.cuda import check_cache
from headwater.engine_core.executors.build.gpu_memory import SPARE_BYTES, Memory

GB = 10**9
MEMORY = Memory(total=140 * GB, others=1 * GB, weights=16 * GB, step=2 * GB)
BLOCK_BYTES = 10 * 10**6


def config(max_model_len: int) -> EngineConfig:
    return EngineConfig(
        block_size=64, num_blocks=max_model_len // 64 + 1, max_model_len=max_model_len
    )


def test_the_cache_gets_what_the_share_leaves() -> None:
    assert MEMORY.left(0.9) == 126 * GB - 21 * GB - SPARE_BYTES


def test_a_cache_that_holds_a_whole_context_is_taken() -> None:
    check_cache(65, config(4096), MEMORY, BLOCK_BYTES, 0.9)


def test_a_context_that_does_not_fit_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        check_cache(33, config(4096), MEMORY, BLOCK_BYTES, 0.25)
    assert "max_model_len is 4096; allowed: at most 2048 in a KV cache of 0.3 GB" in str(
        caught.value
    )
    assert "or gpu_memory_utilization from 0.253 on" in str(caught.value)
    assert "or more beside a max_num_seqs below 256" in str(caught.value)
    assert "weights and tables 16.0, largest step 4.0, others 1.0" in str(caught.value)


def test_more_blocks_than_there_is_memory_for_are_refused_with_how_many_there_can_be() -> None:
    most = (119 * GB - SPARE_BYTES) // BLOCK_BYTES
    check_cache(most, config(4096), MEMORY, BLOCK_BYTES, 0.9)
    with pytest.raises(
        ConfigError, match=f"num_blocks is {most + 1}; allowed: at most {most} blocks"
    ):
        check_cache(most + 1, config(4096), MEMORY, BLOCK_BYTES, 0.9)
