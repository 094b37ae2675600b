"""Models whose layers keep states on two tensor-parallel ranks of a CPU, each with the states of
its heads: with `numerics` tree the bits of one process, and the refusals of what has none."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.options import ExecutorOptions
from tests.engine_core.parallel.test_states_in_stages import PROMPTS, SCORED, SIZES, same
from tests.engine_core.parallel.thread_ranks import ThreadEngine
from tests.engine_core.small_models import FULL, MAMBA, SmallEngine, convert, random_checkpoint

RANKS = {"num_threads": 2, "tensor_parallel_size": 2, "numerics": "tree"}
HEADS: dict[str, dict[str, Any]] = {
    "qwen3.5": {"linear_num_value_heads": 8},
    "lfm2": {},
    "nemotron-h": {"layers_block_type": [MAMBA, "mlp", FULL]},
    "falcon-h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8},
}
"""Fields of each family's config that give every product eight leaves. The keys of falcon-h1 have
one group, which both ranks have; those of nemotron-h have two."""


def made(family: str, base: Path) -> Path:
    random_checkpoint(family, base / "hf", **HEADS[family])
    return convert(base / "hf", base / "ours")


def test_ranks_in_threads_answer_with_the_bits_of_one_process(tmp_path: Path) -> None:
    """Also continued at snapshots."""
    folder = made("nemotron-h", tmp_path)
    with closing(SmallEngine(folder, **SIZES, numerics="tree")) as engine:
        alone = engine.answer(PROMPTS, SCORED)
    with closing(ThreadEngine(folder, **SIZES | RANKS | {"num_threads": 1})) as engine:
        assert same(engine.answer(PROMPTS, SCORED), alone)
        again = engine.answer(PROMPTS, SCORED)
        assert same(again, alone)
        assert [each.cached_tokens for each in again] == [80, 32, 128]


@pytest.mark.long
@pytest.mark.parametrize("family", HEADS)
def test_two_ranks_answer_with_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    """Also continued at snapshots, in chunks and preempted."""
    folder = made(family, tmp_path)
    with closing(SmallEngine(folder, **SIZES, numerics="tree")) as engine:
        alone = engine.answer(PROMPTS, SCORED)
    with closing(SmallEngine(folder, **SIZES, **RANKS)) as engine:
        assert same(engine.answer(PROMPTS, SCORED), alone)
        again = engine.answer(PROMPTS, SCORED)
        assert same(again, alone)
        assert [each.cached_tokens for each in again] == [80, 32, 128]
        few = 34 + 12 * engine.config.state_pages
    small = SIZES | RANKS | {"max_num_batched_tokens": 65, "num_blocks": few}
    with closing(SmallEngine(folder, **small)) as engine:
        twice = engine.answer([*PROMPTS, *PROMPTS[::-1]], SCORED)
        assert same(twice[:3], alone)
        assert same(twice[:2:-1], alone)


@pytest.mark.long
def test_two_ranks_of_two_stages_answer_with_the_bits_of_one_process(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    random_checkpoint("qwen3.5", tmp_path / "hf", **HEADS["qwen3.5"], layer_types=kinds)
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    with closing(SmallEngine(folder, **SIZES, numerics="tree")) as engine:
        alone = engine.answer(PROMPTS, SCORED)
    stages = RANKS | {"num_threads": 4, "pipeline_parallel_size": 2}
    with closing(SmallEngine(folder, **SIZES, **stages)) as engine:
        assert same(engine.answer(PROMPTS, SCORED), alone)


def test_what_ranks_do_with_no_states_is_refused_by_name(tmp_path: Path) -> None:
    folder = made("nemotron-h", tmp_path)
    plain = ExecutorOptions(model_folder=folder, tensor_parallel_size=2)
    for device in (cpu, cuda):
        assert checked(plain, device.name, device.capabilities).options == plain
        stages = replace(plain, tensor_parallel_size=1, pipeline_parallel_size=2)
        assert checked(stages, device.name, device.capabilities).options == stages
    beside = "with a model with 1 state layers and tensor_parallel_size 2"
    for name, value in {"kv_disk_dir": tmp_path, "kv_peer_memory": 1 << 20}.items():
        with pytest.raises(ConfigError, match=f"{name} is .*; allowed: .* {beside}"):
            checked(replace(plain, **{name: value}), "cpu", cpu.capabilities)
    allowed = "1 or 2, which divide 4 query heads, 2 KV heads .*, .* 8 heads of Mamba-2 and 2 groups of them"
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is 4; allowed: {allowed}"):
        checked(replace(plain, tensor_parallel_size=4), "cpu", cpu.capabilities)
    flags = replace(cpu.capabilities, rank_states=False)
    tree = replace(plain, tensor_parallel_size=1, numerics="tree")
    for options, off in (
        (plain, "tensor_parallel_size is 2; allowed: 1"),
        (tree, "numerics is 'tree'; allowed: default"),
    ):
        with pytest.raises(ConfigError, match=f"{off} with a model with 1 state layers"):
            checked(options, "toy", flags)


def test_a_norm_over_all_heads_of_a_state_is_refused_with_numerics_tree(tmp_path: Path) -> None:
    random_checkpoint("granite4-hybrid without experts", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    tree = ExecutorOptions(model_folder=folder, numerics="tree")
    with pytest.raises(ConfigError, match="numerics is 'tree'; allowed: default with norms over"):
        checked(tree, "cpu", cpu.capabilities)
