"""More ranks than KV heads: several have the same one, whatever layers are beside attention."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.model.block_bytes import block_bytes_of, cache_bytes_of
from headwater.engine_core.executors.ranks.rank import block_slice, whole_rank
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights.page_plan import one_group
from headwater.engine_core.weights.shards import Shard
from tests.engine_core.parallel.test_states_in_stages import PROMPTS, SIZES
from tests.engine_core.parallel.thread_ranks import ThreadEngine
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint

TWO = {"tensor_parallel_size": 2, "num_threads": 1}


def made(family: str, base: Path) -> Path:
    random_checkpoint(family, base / "hf", num_key_value_heads=1)
    return convert(base / "hf", base / "ours")


@pytest.mark.parametrize("family", ["qwen2", "qwen3.5-moe"])
def test_two_ranks_with_one_kv_head_answer_as_one_process(family: str, tmp_path: Path) -> None:
    """Also continued at cached blocks."""
    folder = made(family, tmp_path)
    asked = greedy(12, num_logprobs=1)
    with closing(SmallEngine(folder, **SIZES)) as engine:
        alone = engine.answer(PROMPTS, asked)
    with closing(ThreadEngine(folder, **SIZES | TWO)) as engine:
        divided, again = (engine.answer(PROMPTS, asked) for _ in range(2))
    assert all(each.cached_tokens for each in again)
    for answers in (divided, again):
        for ours, theirs in zip(answers, alone, strict=True):
            assert ours.token_ids == theirs.token_ids
            for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_a_block_has_the_head_once_and_the_cache_has_it_for_each_rank(tmp_path: Path) -> None:
    options = ExecutorOptions(model_folder=made("qwen3", tmp_path), tensor_parallel_size=2)
    request = checked(options, "cpu", cpu.capabilities)
    for index in range(2):
        rank = replace(whole_rank(request.model), shard=Shard(index, 2))
        assert block_slice(request, rank).heads == range(1)
        assert rank.local_config(request.model).num_kv_heads == 1
    whole = block_bytes_of(request)
    assert cache_bytes_of(request, one_group(request.model)) == 2 * whole
    tree = replace(options, numerics="tree")
    allowed = "tensor_parallel_size is 2; allowed: at most 1, the KV heads, with numerics tree"
    with pytest.raises(ConfigError, match=allowed):
        checked(tree, "cpu", cpu.capabilities)
