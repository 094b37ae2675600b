"""Models whose layers keep states in two pipeline stages on a CPU, each with the states of its
layers: the bits of one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.weights.shards import Stage, stages
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.small_models import (
    FULL,
    MAMBA,
    Answer,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)

PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (90, 41, 130)]
SCORED = greedy(12, num_logprobs=1)
SIZES: dict[str, Any] = {"max_model_len": 256, "num_blocks": 60}
STAGES = {"num_threads": 2, "pipeline_parallel_size": 2}
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3-next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3.5-moe": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "falcon-h1": {},
    "nemotron-h": {"layers_block_type": [MAMBA, FULL, "mlp"] * 2},
}
"""Fields of each family's config: both stages have keys and values."""


@pytest.mark.long
@pytest.mark.parametrize("family", LAYERS)
def test_two_stages_answer_with_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    """Also in chunks, continued at snapshots, and preempted."""
    random_checkpoint(family, tmp_path / "hf", **LAYERS[family])
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    with closing(SmallEngine(folder, **SIZES)) as engine:
        alone = engine.answer(PROMPTS, SCORED)
    with closing(SmallEngine(folder, **SIZES, **STAGES)) as engine:
        assert same(engine.answer(PROMPTS, SCORED), alone)
        again = engine.answer(PROMPTS, SCORED)
        assert same(again, alone)
        assert [each.cached_tokens for each in again] == [80, 32, 128]
        few = 34 + 12 * engine.config.state_pages
    small = SIZES | STAGES | {"max_num_batched_tokens": 65, "num_blocks": few}
    with closing(SmallEngine(folder, **small)) as engine:
        twice = engine.answer([*PROMPTS, *PROMPTS[::-1]], SCORED)
        assert same(twice[:3], alone)
        assert same(twice[:2:-1], alone)


def test_drafts_in_stages_change_no_bits(tmp_path: Path) -> None:
    """Two of five are wrong, so that the states of both stages are cut. So much is in `make test`:
    the answers of one process are those without drafts."""
    random_checkpoint("qwen3.5-moe", tmp_path / "hf", **LAYERS["qwen3.5-moe"])
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    with closing(SmallEngine(folder, **SIZES)) as engine:
        alone = engine.answer(PROMPTS, SCORED)

    def speculate(config: EngineConfig) -> OracleSpeculator:
        return OracleSpeculator(alone, 0.4).beside(config)

    drafting = SIZES | STAGES | {"max_draft_tokens": 5, "speculate": speculate}
    with closing(SmallEngine(folder, **drafting)) as engine:
        assert same(engine.answer(PROMPTS, SCORED), alone)
        assert engine.engine.load().num_accepted_tokens > 0


def same(answers: list[Answer], others: list[Answer]) -> bool:
    """Tokens and log probabilities, to the bit."""
    return [(each.token_ids, each.logprobs) for each in answers] == [
        (each.token_ids, each.logprobs) for each in others
    ]


def test_what_stages_do_with_no_states_is_refused_by_name(tmp_path: Path) -> None:
    random_checkpoint("lfm2", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    lacking = "allowed: so many that each stage has a layer with keys and values: layers"
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size is '?2'?; {lacking}"):
        SmallEngine(folder, **SIZES, **STAGES)
    tiers = {"kv_disk_dir": tmp_path / "kv", "kv_peer_memory": 1 << 20}
    for name, value in tiers.items():
        beside = "with a model with 3 state layers and pipeline_parallel_size 2"
        with pytest.raises(ConfigError, match=f"{name} is .*; allowed: .* {beside}"):
            SmallEngine(folder, **SIZES, **STAGES, **{name: value})


def test_stages_are_divided_where_each_has_a_layer_with_keys_and_values() -> None:
    sizes = [5, 1, 1, 1, 1, 1]
    has_cache = [False, False, True, False, False, True]
    assert stages(sizes, 0, 0, 2) == [Stage(0, 1, 6), Stage(1, 6, 6)]
    assert stages(sizes, 0, 0, 2, has_cache) == [Stage(0, 3, 6), Stage(3, 6, 6)]
