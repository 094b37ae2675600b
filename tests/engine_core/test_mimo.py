"""MiMo V2 Flash: its published config, and heads of keys and values of two sizes on a device whose
kernels read powers of two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.layers.projection_norms import PaddedHeads
from headwater.engine_core.models.registry import config_of
from headwater.engine_core.options import ExecutorOptions
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint

PUBLISHED: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 0],
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 152576,
}


def test_the_published_config_is_read_by_its_own_names() -> None:
    model = config_of(PUBLISHED)
    # A position sees itself and 128 others.
    assert (model.sliding_window, model.rotary_dim, model.local_rope_theta) == (129, 64, 10_000.0)
    assert model.experts is not None
    assert [model.has_experts(i) for i in range(8)] == [False] + 7 * [True]
    layers = [model.at(i) for i in range(8)]
    assert [each.num_kv_heads for each in layers] == [4, 8, 8, 8, 8, 4, 8, 4]
    assert [each.has_sinks for each in layers] == [each.num_kv_heads == 8 for each in layers]
    assert layers[1].qkv_sizes == (64 * 192, 8 * 192, 8 * 128)
    padded = model.with_padded_heads()
    assert padded.head_dims == (256,)
    assert [padded.at(i).qkv_sizes for i in range(8)] == [each.qkv_sizes for each in layers]


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"swa_head_dim": 128}, "swa_head_dim is 128; allowed: 192"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1; allowed: None"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is True"),
        ({"hybrid_layer_pattern": [2] * 8}, "hybrid_layer_pattern is .*; allowed: a list of 0"),
        ({"v_head_dim": 256, "swa_v_head_dim": 256}, "v_head_dim is 256; allowed: at most head"),
    ],
)
def test_what_no_published_checkpoint_has_is_refused_by_name(
    changed: dict[str, Any], refused: str
) -> None:
    with pytest.raises(ConfigError, match=refused):
        config_of(PUBLISHED | changed)


def test_zeros_pad_heads_behind_the_product() -> None:
    model = replace(config_of(PUBLISHED), num_heads=2, num_kv_heads=1, head_dim=6, value_dim=4)
    heads = PaddedHeads(replace(model, mixed=None).with_padded_heads())
    made = heads(torch.arange(1.0, 23.0)[None]).view(4, 8)
    assert made[0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert made[2].tolist() == [13, 14, 15, 16, 17, 18, 0, 0]
    assert made[3].tolist() == pytest.approx([0.707 * n for n in (19, 20, 21, 22)] + 4 * [0])


def test_padded_heads_answer_as_those_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint("mimo-v2-flash", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    prompts = [[3 + 7 * i % 500 for i in range(n)] for n in (1, 41, 90)]
    found = []
    for flags in (cpu.capabilities, replace(cpu.capabilities, odd_heads=False)):
        monkeypatch.setattr(cpu, "capabilities", flags)
        size = checked(ExecutorOptions(model_folder=folder), "cpu", flags).model.head_dim
        engine = SmallEngine(folder)
        answers = engine.answer(prompts, greedy(4, num_logprobs=1))
        engine.close()
        scores = [entry.logprob for each in answers for entry in each.logprobs]
        found.append((size, [each.token_ids for each in answers], scores))
    (size, tokens, scores), (padded, others, near) = found
    assert (size, padded) == (48, 64)
    assert tokens == others
    assert near == pytest.approx(scores, abs=1e-4)
