"""Page groups of models: equal pages, little of them unused, and what long sequences then take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.build.pages import pages_of
from headwater.engine_core.executors.model.kv_blocks import KvLayout
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.page_plan import PagePlan, one_group, plan_pages

W, F = True, False
LONG = 32_768
GEMMA3_270M = 3 * [*5 * [W], F]
GEMMA3_4B = [*5 * [*5 * [W], F], *4 * [W]]


@pytest.fixture(scope="module")
def small() -> ModelConfig:
    return registry.config_of(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 512,
            "max_position_embeddings": LONG,
            "sliding_window": 512,
        }
    )


def of_layers(small: ModelConfig, is_windowed: list[bool], window: int = 512) -> ModelConfig:
    return replace(
        small,
        num_layers=len(is_windowed),
        is_windowed=tuple(is_windowed),
        sliding_window=window if any(is_windowed) else 0,
    )


@pytest.mark.parametrize(
    ("is_windowed", "num_layers", "num_full", "num_windowed"),
    [
        pytest.param(GEMMA3_270M, 3, 1, 5, id="Gemma 3 270M"),
        pytest.param(4 * [*5 * [W], F] + 2 * [W], 2, 2, 11, id="Gemma 3 1B"),
        pytest.param(GEMMA3_4B, 5, 1, 6, id="Gemma 3 4B"),
        pytest.param(8 * [*5 * [W], F], 8, 1, 5, id="Gemma 3 12B"),
        pytest.param(13 * [W, F], 13, 1, 1, id="Gemma 2 2B"),
        pytest.param(8 * [W, W, W, F], 8, 1, 3, id="OLMo 3 7B"),
        pytest.param(12 * [W, F], 12, 1, 1, id="gpt-oss 20B"),
        pytest.param(32 * [W], 32, 0, 1, id="Mistral 7B v0.1"),
        pytest.param(32 * [F], 32, 1, 0, id="Llama 3.1 8B"),
    ],
)
def test_layers_of_a_kind_are_divided_into_equal_pages(
    is_windowed: list[bool],
    num_layers: int,
    num_full: int,
    num_windowed: int,
    small: ModelConfig,
) -> None:
    plan = plan_pages(of_layers(small, is_windowed), LONG)
    assert plan.windows == (0,) * num_full + (512,) * num_windowed
    assert plan.num_layers == num_layers
    assert plan.num_layers * plan.num_groups <= 1.04 * len(is_windowed)
    assert len(set(plan.places)) == len(is_windowed)
    for (group, place), windowed in zip(plan.places, is_windowed, strict=True):
        assert bool(plan.windows[group]) == windowed
        assert place < num_layers


@pytest.mark.parametrize("window", [1, 512, 513])
def test_a_window_that_hides_nothing_or_all_is_no_kind(window: int, small: ModelConfig) -> None:
    model = of_layers(small, GEMMA3_270M, window)
    assert plan_pages(model, 512) == one_group(model)


def limits(plan: PagePlan) -> EngineConfig:
    return EngineConfig(
        num_blocks=1 << 20,
        page_windows=plan.windows,
        max_model_len=LONG,
        max_num_batched_tokens=2048,
        long_prefill_chunk=512,
    )


@pytest.mark.parametrize(
    ("is_windowed", "window"),
    [
        pytest.param(GEMMA3_270M, 512, id="Gemma 3 270M"),
        pytest.param(GEMMA3_4B, 1024, id="Gemma 3 4B"),
    ],
)
def test_a_long_sequence_takes_a_quarter_of_the_bytes_of_a_full_cache(
    is_windowed: list[bool], window: int, small: ModelConfig
) -> None:
    """While it decodes, and in chunks of 512 tokens while its prompt is computed."""
    model = of_layers(small, is_windowed, window)
    plan = plan_pages(model, LONG)
    page = KvLayout.of(model, torch.bfloat16, plan).block_bytes(16)
    full = LONG // 16 * KvLayout.of(model, torch.bfloat16).block_bytes(16)
    config = limits(plan)
    assert page * config.num_decoding(LONG) <= full / 5
    assert page * config.num_held(LONG) <= full / 4


@pytest.mark.parametrize(
    ("page_windows", "num_pages", "longest"),
    [
        ((0,), 101, 1600),
        ((0,), 1 << 20, LONG),
        ((0, 512, 512), 3 * 100 + 1, 1600),
        ((0, 512, 512), 2 * 129 + 1000 + 1, 16_000),
        ((512,), 130, LONG),
    ],
)
def test_the_longest_sequence_that_fits_holds_as_many_pages_as_there_are(
    page_windows: tuple[int, ...], num_pages: int, longest: int
) -> None:
    config = EngineConfig(
        num_blocks=1 << 20,
        page_windows=page_windows,
        max_model_len=LONG,
        max_num_batched_tokens=2048,
        long_prefill_chunk=512,
    )
    assert config.longest(num_pages) == longest
    assert config.num_held(longest) <= num_pages - 1


@pytest.mark.parametrize(
    ("named", "given"),
    [
        (
            "kv_swap_memory of several ranks",
            {"kv_swap_memory": 1 << 30, "tensor_parallel_size": 2},
        ),
        (
            "kv_disk_dir of several ranks",
            {"kv_disk_dir": Path("kv"), "kv_swap_memory": 0, "tensor_parallel_size": 2},
        ),
        (
            "kv_peer_memory of several ranks",
            {"kv_peer_memory": 1 << 30, "kv_swap_memory": 0, "tensor_parallel_size": 2},
        ),
        ("pipeline_parallel_size", {"pipeline_parallel_size": 2}),
        ("draft_model", {"draft_model": Path("draft")}),
        ("draft_heads", {"draft_heads": Path("heads")}),
    ],
)
def test_layers_with_windows_keep_whole_sequences_beside_what_knows_no_groups(
    named: str, given: dict[str, Any], small: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model = of_layers(small, GEMMA3_270M)
    options = ExecutorOptions(model_folder=None, kv_swap_memory=1 << 30)
    assert pages_of(options, model, LONG).num_groups == 6
    assert not caplog.records
    assert pages_of(replace(options, **given), model, LONG) == one_group(model)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"layers with a window of 512 keep the KV blocks of whole sequences beside {named}"
    )


def test_windows_keep_whole_sequences_where_a_platform_pulls_no_kinds(
    small: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model = of_layers(small, GEMMA3_270M)
    options = ExecutorOptions(model_folder=None, kv_peer_memory=1 << 30)
    assert pages_of(options, model, LONG).num_groups == 6
    assert pages_of(options, model, LONG, pulls_kinds=False) == one_group(model)
    assert caplog.text.rstrip().endswith("whole sequences beside kv_peer_memory")


def test_an_architecture_that_reads_one_group_keeps_all_blocks_of_a_mixed_model(
    small: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    options = ExecutorOptions(model_folder=None)
    mixed = of_layers(small, GEMMA3_270M)
    assert pages_of(options, mixed, LONG, has_groups=False) == one_group(mixed)
    assert "beside the architecture Gemma3ForCausalLM" in caplog.text
    all_windowed = of_layers(small, 4 * [W])
    assert pages_of(options, all_windowed, LONG, has_groups=False).windows == (512,)


def test_models_whose_layers_all_have_windows_keep_them_beside_tiers(small: ModelConfig) -> None:
    model = of_layers(small, 4 * [W])
    options = ExecutorOptions(model_folder=None, kv_swap_memory=1 << 30)
    assert pages_of(options, model, LONG).windows == (512,)
