"""What is read of a Gemma 3, from `config.json` and from GGUF files, and what is refused. Its
tokens are compared with those of transformers in `test_families`."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights.hugging_face import HuggingFaceFolder
from headwater.engine_core.weights.model_config import ModelConfig
from tests.engine_core.small_models import (
    SmallEngine,
    check_greedy,
    convert,
    greedy,
    random_checkpoint,
)

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}


def read(**values: object) -> ModelConfig:
    return registry.config_of(CONFIG | values)


def test_a_config_that_says_little_is_that_of_the_paper() -> None:
    config = read()
    assert config.is_windowed == (True, True, True, True, True, False, True)
    assert (config.sliding_window, config.attention_scale, config.head_dim) == (4096, 1 / 16, 256)
    assert (config.rope_theta, config.local_rope_theta, config.rope_scaling) == (1e6, 1e4, None)
    assert config.tie_word_embeddings


def test_old_and_new_configs_say_the_same_of_rotary_positions() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(
        rope_theta=2e6, rope_local_base_freq=3e4, rope_scaling=scaling, sliding_window_pattern=2
    )
    full = scaling | {"rope_theta": 2e6}
    sliding = {"rope_type": "default", "rope_theta": 3e4}
    kinds = ["sliding_attention", "full_attention"]
    new = read(
        rope_parameters={"full_attention": full, "sliding_attention": sliding},
        layer_types=[*(kinds * 3), kinds[0]],
    )
    assert old == new
    assert (old.rope_theta, old.local_rope_theta, old.rope_scaling) == (2e6, 3e4, scaling)


def test_bases_beside_nested_parameters_that_lack_them_are_those_of_transformers() -> None:
    bases = {"rope_theta": 7e5, "rope_local_base_freq": 3e4}
    nested: dict[str, Any] = {
        kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")
    }
    theirs = transformers.Gemma3TextConfig(
        **bases, rope_parameters=copy.deepcopy(nested)
    ).rope_parameters
    ours = read(**bases, rope_parameters=nested)
    assert (
        [ours.rope_theta, ours.local_rope_theta]
        == [theirs[kind]["rope_theta"] for kind in nested]
        == [7e5, 3e4]
    )


def test_a_scaling_beside_nested_parameters_is_refused() -> None:
    """transformers would read it: it would be left out here."""
    full = {"rope_type": "default", "rope_theta": 1e6}
    scaling = {"rope_type": "linear", "factor": 8.0}
    with pytest.raises(
        ConfigError,
        match=r"rope_scaling is .*; allowed: none beside rope_parameters.full_attention",
    ):
        read(rope_parameters={"full_attention": full}, rope_scaling=scaling)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("rope_parameters", {"rope_type": "linear", "factor": 4.0}),
        ("sliding_window", 0),
        ("sliding_window", 2**60),
        ("sliding_window", "512"),
        ("sliding_window_pattern", 0),
        ("query_pre_attn_scalar", 0),
        ("query_pre_attn_scalar", float("nan")),
        ("rope_theta", -1.0),
        ("rope_theta", "1e6"),
        ("rope_local_base_freq", float("inf")),
        ("rope_parameters", [1]),
        ("rope_scaling", "linear"),
        ("layer_types", ["sliding_attention"] * 6),
        ("layer_types", ["chunked_attention"] * 7),
        ("layer_types", 7),
        ("hidden_activation", "relu"),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention_bias", True),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}"):
        read(**{name: value})


def test_float16_is_refused_by_name_before_weights_are_loaded(tmp_path: Path) -> None:
    random_checkpoint("gemma3", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    allowed = r"^dtype is 'float16'; allowed: bfloat16 or float32 with Gemma3ForCausalLM, whose hidden states exceed"
    with pytest.raises(ConfigError, match=allowed):
        convert(tmp_path / "hf", tmp_path / "half", "float16")
    assert not list((tmp_path / "half").iterdir())
    on_gpus = replace(cpu.capabilities, dtypes=("bfloat16", "float16", "float32"))
    with pytest.raises(ConfigError, match=allowed):
        checked(
            ExecutorOptions(model_folder=folder, load_format="dummy", dtype="float16"),
            "cuda",
            on_gpus,
        )


def test_a_checkpoint_in_float16_whose_hidden_states_exceed_it_is_served_in_a_wider_dtype(
    tmp_path: Path,
) -> None:
    """Embeddings are multiplied by 8, the root of the hidden size."""
    model = random_checkpoint("gemma3", tmp_path / "hf")
    with torch.no_grad():
        model.model.embed_tokens.weight *= 30_000 / model.model.embed_tokens.weight.max()
    model.half().save_pretrained(tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    prompts = [list(range(3, 60)), [5, 6, 7]]
    wide = SmallEngine(convert(tmp_path / "half", tmp_path / "ours"))
    for prompt, answer in zip(prompts, wide.tokens(prompts, greedy(4)), strict=True):
        check_greedy(model.float(), prompt, answer, 4)
    narrow = SmallEngine(convert(tmp_path / "half", tmp_path / "narrow", "bfloat16"))
    answers = narrow.answer(prompts, greedy(4, num_logprobs=1))
    assert all(-1e6 < entry.logprob <= 0 for answer in answers for entry in answer.logprobs)


def write_gguf(path: Path, source: Path, **more: int) -> None:
    """A checkpoint in Hugging Face's layout as llama.cpp's converter writes it: norms with the one
    that they add."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["full_attention"]["factor"])
    for key, value in more.items():
        writer.add_uint32(f"gemma3.attention.{key}", value)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for i in range(config["num_hidden_layers"]):
        names |= {
            f"model.layers.{i}.{hf}.weight": f"blk.{i}.{ours}.weight"
            for ours, hf in LAYER_NAMES.items()
        }
    for name, tensor in HuggingFaceFolder(source).tensors():
        writer.add_tensor(names[name], (tensor + 1 if "norm" in name else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_checkpoint_that_it_was_made_of(tmp_path: Path) -> None:
    model = random_checkpoint("gemma3", tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    folder = convert(tmp_path / "model.gguf", tmp_path / "ours")
    # A file keeps it in float32.
    same = replace(
        registry.read_config(convert(tmp_path / "hf", tmp_path / "same")),
        rms_norm_eps=float(np.float32(1e-6)),
    )
    assert registry.read_config(folder) == same
    prompts = [list(range(3, 130)), [5, 6, 7]]
    engine = SmallEngine(folder)
    for prompt, answer in zip(prompts, engine.tokens(prompts, greedy(8)), strict=True):
        check_greedy(model, prompt, answer, 8)


@pytest.mark.parametrize(
    ("key", "value"), [("head_count", 0), ("head_count", 2**31), ("sliding_window", 0)]
)
def test_a_gguf_file_that_claims_nonsense_is_refused_by_name(
    key: str, value: int, tmp_path: Path
) -> None:
    random_checkpoint("gemma3", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    named = {"head_count": "num_attention_heads", "sliding_window": "sliding_window"}[key]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {named: value}))
    write_gguf(tmp_path / "evil.gguf", tmp_path / "hf")
    with pytest.raises(ConfigError, match=f"{named} is {value}; allowed: a whole number, 1…"):
        convert(tmp_path / "evil.gguf", tmp_path / "ours")


def test_norms_are_what_transformers_makes_of_them_in_bfloat16(tmp_path: Path) -> None:
    """One plus a weight has more digits than bfloat16: hidden states agree to the last but
    rounding."""
    model = random_checkpoint("gemma3", tmp_path / "hf").bfloat16()
    model.save_pretrained(tmp_path / "narrow")
    engine = SmallEngine(convert(tmp_path / "narrow", tmp_path / "ours", "bfloat16"))
    ours = engine.executor._entry._decoder  # type: ignore[attr-defined]  # what an executor holds is its own
    for i, layer in enumerate(model.model.layers):
        assert torch.equal(
            ours.layers[i].mlp_norm.weight, 1 + layer.post_feedforward_layernorm.weight.float()
        )
    ids = torch.tensor([3, 99, 511])
    assert torch.equal(ours.embedding(ids), model.model.embed_tokens(ids))
