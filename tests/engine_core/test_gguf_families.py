"""GGUF files of each family that llama.cpp's converter makes: the same model as the checkpoint that
they were made of.

Names of tensors are those of the package gguf. What the converter changes of tensors and writes as
metadata is written here a second time, from its code; no file of the converter's own is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import registry
from headwater.engine_core.weights.formats.gguf_families import FAMILIES as GGUF_FAMILIES
from headwater.engine_core.weights.formats.gguf_families import architectures
from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.kernels.quant.block_formats import BlockWeight, expand
from tests.engine_core.small_models import (
    FAMILIES,
    GEMMA4,
    HEADS_OF_32,
    SHAPE,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.long_values import long_but

Writer = gguf.GGUFWriter
Metadata = Callable[[Writer, Any], None]
Change = Callable[[str, torch.Tensor, Any], torch.Tensor]


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    halves = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def of_llama(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Classes of the converter that inherit from that of Llama."""
    if name.endswith("q_proj.weight"):
        return permuted(tensor, config.num_attention_heads)
    if name.endswith("k_proj.weight"):
        return permuted(tensor, config.num_key_value_heads)
    return tensor


def of_gemma(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def unchanged(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return tensor


def heads(writer: Writer, config: Any) -> None:
    writer.add_key_length(config.head_dim)


def of_gemma2(writer: Writer, config: Any) -> None:
    heads(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def windows(writer: Writer, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def of_olmo3(writer: Writer, config: Any) -> None:
    windows(writer, config)
    rope = config.rope_parameters["full_attention"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def of_granite(writer: Writer, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def of_phi3(writer: Writer, config: Any) -> None:
    head_dim = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_sliding_window(config.sliding_window or 0)
    if "long_factor" in rope:
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for form in ("long", "short"):
            factors = torch.tensor(rope[f"{form}_factor"], dtype=torch.float32)
            writer.add_tensor(f"rope_factors_{form}.weight", factors.numpy())


def of_exaone4(writer: Writer, config: Any) -> None:
    heads(writer, config)
    windows(writer, config)


def of_gemma4(writer: Writer, config: Any) -> None:
    windows(writer, config)
    shapes = SimpleNamespace(**config.per_layer_config["2"])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length(shapes.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_rope_dimension_count(shapes.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.use_double_wide_mlp:
        num_own = config.num_hidden_layers - config.num_kv_shared_layers
        wide = [1 if i < num_own else 2 for i in range(config.num_hidden_layers)]
        key = gguf.Keys.LLM.FEED_FORWARD_LENGTH.format(arch="gemma4")
        writer.kv_data[0].pop(key)
        writer.add_feed_forward_length([config.intermediate_size * each for each in wide])
    rotated = shapes.head_dim // 8
    factors = [1.0] * rotated + [1e30] * (shapes.head_dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())


def nothing(writer: Writer, config: Any) -> None:
    """All that the file says is what all files say."""


WRITTEN: dict[str, tuple[str, Change, Metadata]] = {
    "gemma": ("gemma", of_gemma, heads),
    "gemma2": ("gemma2", of_gemma, of_gemma2),
    "gemma4": ("gemma4", unchanged, of_gemma4),
    "gemma4 whose keys are values": ("gemma4", unchanged, of_gemma4),
    "phi3": ("phi3", unchanged, of_phi3),
    "phi4-mini": ("phi3", unchanged, of_phi3),
    "olmo2": ("olmo2", unchanged, nothing),
    "olmo3": ("olmo2", unchanged, of_olmo3),
    "granite": ("granite", of_llama, of_granite),
    "smollm3": ("smollm3", of_llama, nothing),
    "exaone4": ("exaone4", unchanged, of_exaone4),
    "seed-oss": ("seed_oss", unchanged, heads),
    "ernie4.5": ("ernie4_5", unchanged, heads),
}
"""By family: the file's architecture, what becomes of a tensor, and what the file says beside."""
AS_FILES_ASSUME: dict[str, Callable[[], Any]] = {
    # A file does not say which scalar scales scores, nor which layers rotate.
    "gemma2": lambda: transformers.Gemma2Config(
        **HEADS_OF_32 | {"tie_word_embeddings": True},
        sliding_window=40,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=32,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **SHAPE | {"num_hidden_layers": 5, "tie_word_embeddings": True}, pad_token_id=0
    ),
}


def write(folder: Path, family: str, path: Path, kind: Any = gguf.GGMLQuantizationType.F32) -> Any:
    """Writes the file of a small random checkpoint, which goes into `folder`; returns the
    transformers model."""
    model = random_checkpoint(family, folder)
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    name, change, more = WRITTEN[family]
    writer = Writer(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    more(writer, config)
    arch = next(each for each, its in gguf.MODEL_ARCH_NAMES.items() if its == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for each, tensor in load_file(folder / "model.safetensors").items():
        whole = each + ".weight" if each.endswith("layer_scalar") else each
        ours = names.get_name(whole, (".weight", ".bias"))
        data = change(each, tensor, config).numpy()
        is_packed = data.ndim == 2 and data.shape[1] % 32 == 0
        used = kind if is_packed else gguf.GGMLQuantizationType.F32
        writer.add_tensor(ours, gguf.quants.quantize(data, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def facts(config: Any) -> dict[str, Any]:
    """Fields of a model's config, numbers to the precision of a file."""
    return {
        each.name: shortened(getattr(config, each.name))
        for each in fields(config)
        if each.name not in ("architecture", "foreign")
    }


def shortened(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: shortened(each) for key, each in value.items()}
    return tuple(map(shortened, value)) if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("family", long_but(WRITTEN, "gemma4", "phi4-mini", "olmo3", "granite"))
def test_a_file_is_the_checkpoint_that_it_was_made_of(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family, AS_FILES_ASSUME.get(family, FAMILIES[family]))
    write(tmp_path / "hf", family, tmp_path / "model.gguf")
    theirs = convert(tmp_path / "hf", tmp_path / "theirs")
    ours = convert(tmp_path / "model.gguf", tmp_path / "ours")
    assert facts(registry.read_config(ours)) == facts(registry.read_config(theirs))
    found = load_file(ours / "weights.safetensors")
    expected = load_file(theirs / "weights.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # A norm that the converter adds 1 to has lost its last bits.
        assert torch.allclose(found[name], tensor, atol=1e-6, rtol=0), name


def test_every_architecture_of_files_is_served() -> None:
    assert architectures() <= registry.ARCHITECTURES.keys()
    assert {arch for arch, *_ in WRITTEN.values()} <= GGUF_FAMILIES.keys()


def test_tables_of_a_packed_file_stay_packed(tmp_path: Path) -> None:
    """Those of vectors of layers too."""
    small = {"hidden_size": 64, "hidden_size_per_layer_input": 32}
    FAMILIES["gemma4 packed"] = lambda: transformers.Gemma4TextConfig(**GEMMA4 | small)
    WRITTEN["gemma4 packed"] = WRITTEN["gemma4"]
    kind = gguf.GGMLQuantizationType.Q8_0
    model = write(tmp_path / "hf", "gemma4 packed", tmp_path / "model.gguf", kind)
    folder = convert(tmp_path / "model.gguf", tmp_path / "ours")
    stored = load_file(folder / "weights.safetensors")
    assert not any(name in stored for name in ("embed", "layer_table"))
    state = model.state_dict()
    for name, tensor in GgufFile(tmp_path / "model.gguf").tensors():
        plain = expand(tensor, torch.float32) if isinstance(tensor, BlockWeight) else tensor
        state[
            "model.layers" + name.removeprefix("model.layers").removesuffix(".weight")
            if name.endswith("layer_scalar.weight")
            else name
        ].copy_(plain)
    prompt = list(range(3, 40))
    engine = SmallEngine(folder, activation_dtype="model")
    answer = engine.answer([prompt], greedy(8, num_logprobs=1))[0]
    engine.close()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
    after = logits[len(prompt) - 1 : -1]
    assert answer.token_ids == after.argmax(-1).tolist()
    assert [each.logprob for each in answer.logprobs] == pytest.approx(
        after.max(-1).values.tolist(), abs=1e-3
    )


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("expert_count", 8, "gemma4.expert_count is 8; allowed: none"),
        ("attention.sliding_window_pattern", [True], "sliding_window_pattern is .*; allowed: 9 of"),
        (
            "attention.key_length_swa",
            48,
            r"attn_k.weight is \(64, 64\); allowed: whole heads of 48",
        ),
        ("rope.scaling.type", "dynamic", "rope.scaling.type is 'dynamic'; allowed: none, linear"),
    ],
)
def test_what_is_not_served_of_a_file_is_refused_by_its_key(
    key: str, value: Any, refused: str, tmp_path: Path
) -> None:
    write(tmp_path / "hf", "gemma4", tmp_path / "model.gguf")
    file = GgufFile(tmp_path / "model.gguf")
    real = file.meta
    file.meta = lambda name, *default: value if name == key else real(name, *default)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=refused):
        registry.config_of(file.hf_config())
