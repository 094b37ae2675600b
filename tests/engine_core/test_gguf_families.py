"""GGUF files of each family, as llama.cpp's converter wrote them (`make_gguf_files.py`): the same
model as the checkpoint that they were made of, with the answers of transformers and of
llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import conversion, registry
from headwater.engine_core.weights.formats.gguf_families import architectures
from headwater.engine_core.weights.formats.gguf_file import GgufFile
from tests.engine_core.gguf_models import FAMILIES, PROMPT, as_published
from tests.engine_core.small_models import (
    SmallEngine,
    architecture_of,
    convert,
    expanded,
    greedy,
)
from tests.long_values import long_but

FILES = Path(__file__).parent / "gguf_files"
EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
ANSWERS: dict[str, dict[str, Any]] = EXPECTED["answers"]
A_FAMILY_OF_EACH_MECHANISM = (
    *("llama", "glm4", "cohere2", "gpt2", "gpt-neox", "ministral3", "phi4-mini", "starcoder2"),
    *("gemma3-with-a-tower", "gemma4-with-a-tower", "qwen3-moe", "glm4-moe", "gpt-oss"),
    *("lfm2", "granite-hybrid", "nemotron3", "qwen3.5", "deepseek-v3.2"),
)
"""Rows of queries and keys in llama.cpp's order, with their biases; pairs of neighbours that
rotate, in a part of a head; layers without positions; matrices that checkpoints have transposed;
heads one after the other there; queries that grow; factors of long positions; biases of norms;
norms that multiply by 1 + weight; layers of two shapes; experts, and those chosen by corrected
scores, with a layer that drafts; those in MXFP4, with biases; key heads by layer; rates of Mamba-2;
layers of one mixer each; value heads in turns; latents, whose keys and values are raised by two
tensors, with indexers."""
IN_WEIGHTS = ("multipliers", "attention_scale", "embedding_scale", "logit_scale")
"""Factors that the converter multiplies weights of a model with multipliers by."""
ROUNDED_BY_LLAMA_CPP = 0.02
"""Difference of log probabilities at most: it rounds inputs of products to float16."""
HALF_A_STEP = 0.5 / 127 / 2
"""Rounding of Q8_0: the largest number of a block is half."""


def published_config(family: str) -> dict[str, Any]:
    """Content of the `config.json` that a file was made of."""
    config = FAMILIES[family]()
    named = {"architectures": [architecture_of(config)]}
    written = json.loads(config.to_json_string(use_diff=False))
    return as_published(written | named, family)


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
    if is_dataclass(value):
        return {each.name: shortened(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: shortened(each) for key, each in value.items()}
    return tuple(map(shortened, value)) if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("family", long_but(FAMILIES, *A_FAMILY_OF_EACH_MECHANISM))
def test_a_file_of_llama_cpps_converter_answers_as_its_checkpoint(
    family: str, tmp_path: Path
) -> None:
    folder = convert(FILES / f"{family}.gguf", tmp_path / "ours")
    theirs = registry.config_of(published_config(family))
    stated, published = (facts(each) for each in (registry.read_config(folder), theirs))
    if stated["delta"] is not None:
        # Projections of Qwen3-Next lie by kind in a file.
        del stated["delta"]["is_by_head"], published["delta"]["is_by_head"]
    if stated["multipliers"] is not None:
        for name in IN_WEIGHTS:
            del stated[name], published[name]
    assert stated == published
    engine = SmallEngine(folder, num_blocks=100, max_model_len=min(256, theirs.most_positions))
    by_transformers = ANSWERS[family]["transformers"]
    sampling = greedy(len(by_transformers["token_ids"]), num_logprobs=1)
    answer = engine.answer([PROMPT], sampling)[0]
    engine.close()
    found = [entry.logprob for entry in answer.logprobs]
    assert answer.token_ids == by_transformers["token_ids"]
    assert found == pytest.approx(by_transformers["logprobs"], abs=1e-3)
    by_llama_cpp = ANSWERS[family].get("llama.cpp")
    if by_llama_cpp is not None:
        assert answer.token_ids == by_llama_cpp["token_ids"]
        assert found == pytest.approx(by_llama_cpp["logprobs"], abs=ROUNDED_BY_LLAMA_CPP)


def test_each_architecture_of_files_is_served_and_was_read_from_one() -> None:
    assert architectures() <= registry.ARCHITECTURES.keys()
    read = {published_config(family)["architectures"][0] for family in FAMILIES}
    # The text part of models with a tower has the same files.
    qwen = {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
    assert architectures() - read == {"Gemma3ForCausalLM", "KimiK25ForConditionalGeneration"} | qwen
    assert ANSWERS.keys() == FAMILIES.keys()


def test_experts_in_mxfp4_stay_packed(tmp_path: Path) -> None:
    folder = convert(FILES / "gpt-oss.gguf", tmp_path)
    stored = load_file(folder / "weights.safetensors")
    assert {"layers.0.experts_gate_up.mxfp4", "layers.1.experts_down.mxfp4"} <= stored.keys()


def test_layers_that_draft_are_left_out_and_listed(tmp_path: Path) -> None:
    file = FILES / "glm4-moe.gguf"
    converted = conversion.convert(
        file, tmp_path, dtype="float32", progress=lambda done, total: None
    )
    num_drafting = sum(tensor.name.startswith("blk.2.") for tensor in GGUFReader(file).tensors)
    assert converted.left_out == f"model.layers ({num_drafting})"
    assert registry.read_config(tmp_path).num_layers == 2


def test_half_of_a_tensor_in_two_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes((FILES / "deepseek-v2.gguf").read_bytes().replace(b"attn_v_b", b"attn_x_b"))
    with pytest.raises(ConfigError, match=r"without blk\.0\.attn_v_b\.weight"):
        dict(GgufFile(path).tensors())


def test_layers_that_are_no_number_are_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(path := tmp_path / "text.gguf", "deepseek2")
    writer.add_string("deepseek2.block_count", "two")
    writer.add_head_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_key_length(48)
    writer.add_rope_dimension_count(16)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="block_count is 'two'"):
        GgufFile(path).hf_config()


@pytest.mark.parametrize("family", ["deepseek-v3", "gemma4", "gpt2", "llama"])
def test_a_packed_file_stays_packed_and_has_the_weights_of_the_plain_one(
    family: str, tmp_path: Path
) -> None:
    """A tensor that files have in two, permuted rows, matrices that checkpoints have transposed,
    and tables of vectors of layers."""
    plain = expanded(GgufFile(FILES / f"{family}.gguf"))
    packed = expanded(GgufFile(FILES / f"{family}-q8_0.gguf"))
    assert packed.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.allclose(packed[name], tensor, rtol=1e-3, atol=HALF_A_STEP), name
    folder = convert(FILES / f"{family}-q8_0.gguf", tmp_path / "ours")
    stored = load_file(folder / "weights.safetensors")
    matrices = ("embed", "layer_table", "layers.0.qkv", "layers.0.q_b", "layers.1.o")
    matrices += ("layers.1.gate_up", "layers.1.experts_gate_up")
    assert not stored.keys() & {*matrices}
    engine = SmallEngine(folder, activation_dtype="model", num_blocks=100)
    answer = engine.answer([PROMPT], greedy(1, num_logprobs=1))[0]
    engine.close()
    expected = ANSWERS[family]["transformers"]
    assert answer.token_ids == expected["token_ids"][:1]
    assert answer.logprobs[0].logprob == pytest.approx(expected["logprobs"][0], abs=0.1)


@pytest.mark.parametrize(
    ("family", "key", "value", "refused"),
    [
        (
            "gemma4",
            "attention.sliding_window_pattern",
            [True],
            "sliding_window_pattern is .*; allowed: 4 of",
        ),
        (
            "gemma4",
            "attention.key_length_swa",
            24,
            r"attn_k.weight is \(16, 32\); allowed: whole heads of 24",
        ),
        (
            "gemma4",
            "rope.scaling.type",
            "dynamic",
            "rope.scaling.type is 'dynamic'; allowed: none, linear",
        ),
        ("glm4-moe", "nextn_predict_layers", -1, "nextn_predict_layers is -1; allowed: 0…16"),
        ("glm4-moe", "expert_gating_func", 1, "expert_gating_func is 1; allowed: 2: sigmoid"),
        ("hy3", "expert_weights_norm", False, "expert_weights_norm is False; allowed: true"),
        ("glm4", "rope.dimension_count", 40, "rope.dimension_count is 40; allowed: 1…32"),
        ("glm4", "rope.dimension_sections", [4, 2], r"dimension_sections is \[4, 2\]; allowed: no"),
        ("llama", "rope.dimension_count", 8, "rope.dimension_count is 8; allowed: 16: all of a"),
        ("mistral3", "attention.temperature_scale", 0.1, "temperature_scale is 0.1; allowed: 0 wi"),
    ],
)
def test_what_is_not_served_of_a_file_is_refused_by_its_key(
    family: str, key: str, value: Any, refused: str
) -> None:
    file = GgufFile(FILES / f"{family}.gguf")
    real = file.meta
    file.meta = lambda name, *default: value if name == key else real(name, *default)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=refused):
        registry.config_of(file.hf_config())


@pytest.mark.parametrize(
    ("family", "key", "value", "allowed"),
    [
        ("lfm2", "attention.head_count_kv", [1], "numbers of 2 layers"),
        ("nemotron3", "feed_forward_length", 16, "numbers of 5 layers"),
        ("granite-hybrid", "ssm.inner_size", 66, r"a multiple of ssm.time_step_rank \(4\)"),
    ],
)
def test_what_a_file_says_of_its_state_layers_is_refused_by_its_key(
    family: str, key: str, value: Any, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GgufFile(FILES / f"{family}.gguf")
    stated = file.meta
    monkeypatch.setattr(
        file, "meta", lambda name, *rest: value if name == key else stated(name, *rest)
    )
    with pytest.raises(ConfigError, match=f"{key} is .*; allowed: {allowed}"):
        file.hf_config()
