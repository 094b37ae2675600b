"""Bytes of the pool that hold nothing under mixed load, for published shapes with states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.build.engine_limits import engine_config_of
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.executors.simulated.states import num_units
from headwater.engine_core.models.registry import config_of
from headwater.engine_core.options import BuildRequest, ExecutorOptions
from headwater.engine_core.page_groups import FULL
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.published_states import SHAPES
from tests.long_values import long_but

MOST_WASTE = 0.04
MOST_ON_A_CPU = {"Nemotron-3-Nano-30B-A3B": 0.08, "Nemotron-Nano-9B-v2": 0.06}
"""Their tails in float32 fill a page of keys and values by 72 %, or with pieces by 96 %."""
MAX_MODEL_LEN = 1024


def config_for(name: str, *, is_cpu: bool, block_size: int = 16) -> EngineConfig:
    """Limits of an engine of a GPU, or of a CPU, in bfloat16, whose pool has room for about as many
    of the longest sequences as run at once."""
    model = config_of(SHAPES[name])
    options = ExecutorOptions(
        model_folder=Path("unread"),
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )
    request = BuildRequest(
        options=options,
        model=model.with_solved_states() if is_cpu else model,
        dtype="bfloat16",
        kv_format="bfloat16",
        activations="bfloat16",
    )
    config = engine_config_of(request, 0)
    of_sequence = MAX_MODEL_LEN // block_size + 2 * config.state_pages
    return replace(config, num_blocks=config.max_num_seqs * of_sequence)


def wasted_share(config: EngineConfig) -> float:
    """Bytes of the pool that hold nothing, on average over the steps of a seeded load: prompts of
    20 to 900 tokens, answers of 10 to 60. Pages that are no state's count as pages of keys and
    values."""
    rng = np.random.default_rng(0)
    model = SimulatedModel(vocab_size=4096, num_state_units=num_units(config.state_pages))
    engine = Engine(config, SimulatedExecutor(config, model, verify_every=1 << 30))
    for key in range(32):
        prompt = rng.integers(4096, size=rng.integers(20, 900)).tolist()
        sampling = SamplingParams(max_tokens=int(rng.integers(10, 60)), seed=key)
        engine.add(NewRequest(key=key, prompt_ids=prompt, output_ids=[], sampling=sampling))
    padding = config.page_sizes.padding(FULL)
    shares = []
    while engine.has_work():
        engine.step()
        load = engine.load()
        num_cached = config.num_blocks - sum(load.num_pages_by_window.values())
        wasted = sum(load.wasted_bytes.values()) + num_cached * padding
        shares.append(wasted / (config.num_blocks * config.page_sizes.page))
    return float(np.mean(shares))


@pytest.mark.parametrize(
    "name",
    long_but(
        SHAPES,
        "Qwen3.6-35B-A3B",
        "Nemotron-3-Nano-30B-A3B",
        "Granite-4.0-H-Micro",
        "Falcon-H1-3B",
        "LFM2-1.2B",
    ),
)
def test_little_of_the_pool_is_wasted_under_mixed_load_on_a_gpu(name: str) -> None:
    assert wasted_share(config_for(name, is_cpu=False)) <= MOST_WASTE


@pytest.mark.parametrize("name", long_but(SHAPES, "Qwen3.5-2B", "Falcon-H1-0.5B"))
def test_little_of_the_pool_is_wasted_under_mixed_load_on_a_cpu(name: str) -> None:
    most = MOST_ON_A_CPU.get(name, MOST_WASTE)
    assert wasted_share(config_for(name, is_cpu=True)) <= most


def test_the_log_says_what_pages_and_sets_pad() -> None:
    config = config_for("Qwen3.6-35B-A3B", is_cpu=False)
    described = config.page_sizes.described(config.page_kinds, config.state_pages)
    assert described == (
        "pages of 0.330 MB: full pads 0.8% of its pages, state sets of 79.3 MB pad 0.0%"
    )
