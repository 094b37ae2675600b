"""Conversion: what is read, what is refused and why; every GGUF quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.layers.rope import cos_sin_table
from headwater.engine_core.models import registry
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.engine_core.weights.hugging_face import HuggingFaceFolder
from headwater.kernels.quant.block_formats import BlockWeight, expand
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint

KINDS = {
    "F32": (gguf.GGMLQuantizationType.F32, 0.0),
    "F16": (gguf.GGMLQuantizationType.F16, 1e-3),
    "BF16": (gguf.GGMLQuantizationType.BF16, 1e-2),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, 1e-2),
    "Q5_0": (gguf.GGMLQuantizationType.Q5_0, 0.1),
    "Q4_0": (gguf.GGMLQuantizationType.Q4_0, 0.2),
    "Q4_1": (gguf.GGMLQuantizationType.Q4_1, 0.2),
}


def write_gguf(
    path: Path,
    source: Path,
    kind: gguf.GGMLQuantizationType,
    *,
    numbers: Mapping[str, float] = MappingProxyType({}),
    others: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
    without: str = "",
) -> None:
    """Writes a checkpoint in Hugging Face's layout as the GGUF file that converters make of it.
    `numbers` are added metadata, `others` are added tensors, and `without` names a tensor that is
    left out."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    for key, value in numbers.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, values in others.items():
        writer.add_tensor(name, values)
    tensors = HuggingFaceFolder(source).tensors()
    names = {hf: ours for ours, hf in _names(config["num_hidden_layers"]).items()}
    for name, tensor in tensors:
        if names[name] == without:
            continue
        data = _interleaved(name, tensor, config).numpy()
        quantised = kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(names[name], gguf.quants.quantize(data, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _names(num_layers: int) -> dict[str, str]:
    stems = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names = {
        f"blk.{i}.{g}.weight": f"model.layers.{i}.{h}.weight"
        for i in range(num_layers)
        for g, h in stems.items()
    }
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stems = {f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"}
    biases = {
        f"blk.{i}.{g}.bias": f"model.layers.{i}.{h}.bias"
        for i in range(num_layers)
        for g, h in stems.items()
    }
    return names | biases | {f"{g}.weight": f"{h}.weight" for g, h in whole.items()}


def _interleaved(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if projection in name:
            return (
                tensor.reshape(config[heads], 2, -1, *tensor.shape[1:])
                .transpose(1, 2)
                .reshape(tensor.shape)
                .contiguous()
            )
    return tensor


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_holds_the_checkpoint_up_to_its_precision(kind: str, tmp_path: Path) -> None:
    quantisation, tolerance = KINDS[kind]
    random_checkpoint("llama2", tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", quantisation)
    hf = convert(tmp_path / "hf", tmp_path / "a")
    ours = convert(tmp_path / "model.gguf", tmp_path / "b")
    expected, loaded = (model_file.load(folder, torch.device("cpu")) for folder in (hf, ours))
    for name, tensor in expected.items():
        assert torch.dist(loaded[name], tensor) <= tolerance * tensor.norm(), name
    if kind == "F32":
        prompts = [[5, 6, 7], list(range(3, 60))]
        engines = [SmallEngine(folder) for folder in (hf, ours)]
        assert engines[0].tokens(prompts, greedy(8)) == engines[1].tokens(prompts, greedy(8))


def test_biases_of_queries_and_keys_are_in_the_order_of_their_rows(tmp_path: Path) -> None:
    random_checkpoint("qwen2", tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", gguf.GGMLQuantizationType.F32)
    found = dict(GgufFile(tmp_path / "model.gguf").tensors())
    biases = {
        name: bias
        for name, bias in HuggingFaceFolder(tmp_path / "hf").tensors()
        if name.endswith(".bias")
    }
    assert len(biases) == 9
    for name, bias in biases.items():
        assert torch.equal(found[name], bias), name


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear_scaling_as_older_converters_write_it(
    key: str, tmp_path: Path
) -> None:
    """As llama.cpp reads it, which takes the second name for an older one of the first."""
    random_checkpoint("llama2", tmp_path / "hf")
    f32 = gguf.GGMLQuantizationType.F32
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", f32, numbers={f"llama.{key}": 4.0})
    config = registry.config_of(GgufFile(tmp_path / "model.gguf").hf_config())
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_rope_factors_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope = transformers.LlamaConfig(
        **config | {"rope_parameters": {**scaling, "original_max_position_embeddings": 8192}}
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](rope, "cpu")
    factors = 1e4 ** -(torch.arange(8) / 8) / scaled
    assert factors.max() > 31
    assert len(set(factors.tolist())) > 2
    others = {"rope_freqs.weight": factors.numpy()}
    write_gguf(
        tmp_path / "model.gguf", tmp_path / "hf", gguf.GGMLQuantizationType.F32, others=others
    )
    ours = registry.read_config(convert(tmp_path / "model.gguf", tmp_path / "ours"))
    table = cos_sin_table(ours, 64)
    torch.testing.assert_close(table[:, :8], torch.outer(torch.arange(64.0), scaled).cos())


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_XS", "IQ2_XXS", "TQ1_0"])
def test_types_of_a_gguf_file_that_are_not_served_are_refused_by_tensor_and_type(
    kind: str, tmp_path: Path
) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    rows = np.zeros((8, gguf.GGML_QUANT_SIZES[quantisation][1]), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ConfigError,
        match=f"type of tensor blk.0.ffn_up.weight is '{kind}'; allowed: BF16, F16, F32, MXFP4, Q4_0",
    ):
        GgufFile(tmp_path / "k.gguf")


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants_are_dequantised_by_their_formula(kind: str, tmp_path: Path) -> None:
    """The `gguf` package writes no k-quants: the blocks are random bits, read by it and by the
    published formula."""
    quantisation = gguf.GGMLQuantizationType[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    rows = np.random.default_rng(0).integers(0, 256, (8, num_bytes * 2), np.uint8)
    scales = {"Q4_K": slice(0, 4), "Q6_K": slice(num_bytes - 2, num_bytes)}[kind]
    for start in (0, num_bytes):
        count = (scales.stop - scales.start) // 2
        rows[:, start + scales.start : start + scales.stop] = np.full(
            (8, count), 0.01, np.float16
        ).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((name, tensor),) = GgufFile(tmp_path / "k.gguf").tensors()
    expected = np.concatenate(
        [_dequantise(kind, rows[:, :num_bytes]), _dequantise(kind, rows[:, num_bytes:])], axis=1
    )
    assert isinstance(tensor, BlockWeight)
    assert (name, tensor.shape) == ("model.layers.0.mlp.up_proj.weight", (8, 2 * block))
    np.testing.assert_allclose(expand(tensor, torch.float32).numpy(), expected, rtol=1e-6)


def _dequantise(kind: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Super-blocks of 256 values [R, bytes], from the layout that llama.cpp publishes."""
    return np.stack([{"Q4_K": _q4_k, "Q6_K": _q6_k}[kind](row) for row in rows])


def _q4_k(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    d, dmin = row[:4].view(np.float16).astype(np.float32)
    scales = row[4:16].astype(int)
    values = row[16:].astype(int)
    out = np.empty(256, np.float32)
    for j in range(8):
        if j < 4:
            scale = scales[j] & 63
            low = scales[j + 4] & 63
        else:
            scale = (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4
            low = (scales[j + 4] >> 4) | (scales[j] >> 6) << 4
        nibbles = values[32 * (j // 2) : 32 * (j // 2) + 32] >> (4 * (j % 2)) & 15
        out[32 * j : 32 * j + 32] = d * scale * nibbles - dmin * low
    return out


def _q6_k(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    low = row[:128].astype(int)
    high = row[128:192].astype(int)
    scales = row[192:208].view(np.int8).astype(int)
    d = float(row[208:210].view(np.float16)[0])
    out = np.empty(256, np.float32)
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                nibble = low[64 * half + 32 * (quarter % 2) + i] >> (4 * (quarter // 2)) & 15
                two = high[32 * half + i] >> (2 * quarter) & 3
                scale = scales[8 * half + 2 * quarter + i // 16]
                out[128 * half + 32 * quarter + i] = d * scale * ((nibble | two << 4) - 32)
    return out


def test_an_architecture_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="architectures is 'MambaForCausalLM'"):
        registry.config_of({"architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("method", ["gguf", "bitsandbytes", "exl2", "modelopt", None])
def test_packed_weights_are_refused_by_their_method_before_any_tensor_is_read(
    key: str, method: str | None, tmp_path: Path
) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps(config | {key: {"bits": 4, "quant_method": method}})
    )
    # Nothing that could be read as a tensor.
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=f"{key}.quant_method is {method!r}; allowed: gptq, awq, auto-round, "
    ):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    tensors = HuggingFaceFolder(tmp_path / "hf").tensors()
    kept = {
        name: tensor for name, tensor in tensors if name != "model.layers.1.mlp.down_proj.weight"
    }
    from safetensors.torch import save_file  # noqa: PLC0415 (this test alone writes one)

    save_file(kept, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.down"):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_a_second_process_shares_the_pages_of_the_weights(tmp_path: Path) -> None:
    """Loaded tensors lie in the file's mapping, so that they cost a second replica nothing."""
    random_checkpoint("llama2", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    loaded = model_file.load(folder, torch.device("cpu"))
    mapped = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder) in line
    ]
    spans = [tuple(int(part, 16) for part in line[0].split("-")) for line in mapped]
    for name, tensor in loaded.items():
        assert any(start <= tensor.data_ptr() < end for start, end in spans), name
