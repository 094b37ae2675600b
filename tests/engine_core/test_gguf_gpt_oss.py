"""GGUF files of gpt-oss: the same model as the checkpoint that they were made of, packed or not.

What llama.cpp's converter writes is written here a second time, from its code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import registry
from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.engine_core.weights.hugging_face import HuggingFaceFolder
from tests.engine_core.mxfp4_checkpoint import write_mxfp4
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.engine_core.test_gguf_families import facts

MXFP4 = gguf.GGMLQuantizationType.MXFP4
PROMPT = [i * 7 % 500 + 3 for i in range(60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints: `packed` in MXFP4, and `expanded`."""
    base = tmp_path_factory.mktemp("gpt-oss")
    # A file does not say which layers have windows.
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    random_checkpoint("gpt-oss", base / "source", layer_types=kinds)
    write_mxfp4(base / "source", base / "packed", base / "expanded")
    return base


def write(folder: Path, path: Path, *, scale: int = 0) -> Path:
    """Writes the file of a checkpoint. `scale`: of all blocks, 0: those of the checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    tensors = dict(HuggingFaceFolder(folder).tensors())
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    arch = gguf.MODEL_ARCH.GPT_OSS
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        if ".experts." in name:
            _add_experts(writer, name, tensors, scale)
            continue
        whole = name + ".weight" if name.endswith("sinks") else name
        ours = names.get_name(whole, (".weight", ".bias"))
        assert ours is not None, whole
        writer.add_tensor(ours, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_experts(writer: Any, name: str, tensors: dict[str, torch.Tensor], scale: int) -> None:
    layer = name.split(".")[2]
    tensor = tensors[name]
    stem = f"blk.{layer}.ffn_{{}}_exps"
    if name.endswith("down_proj_bias"):
        writer.add_tensor(stem.format("down") + ".bias", tensor.numpy())
    elif name.endswith("gate_up_proj_bias"):
        for i, part in enumerate(("gate", "up")):
            writer.add_tensor(stem.format(part) + ".bias", tensor[:, i::2].contiguous().numpy())
    elif name.endswith("_blocks"):
        scales = tensors[name.removesuffix("blocks") + "scales"]
        whole = _in_ggml_order(tensor, scales if not scale else torch.full_like(scales, scale))
        parts = (
            {"down": whole} if "down" in name else {"gate": whole[:, 0::2], "up": whole[:, 1::2]}
        )
        for part, data in parts.items():
            own = np.ascontiguousarray(data)
            writer.add_tensor(stem.format(part) + ".weight", own, raw_dtype=MXFP4)
    elif not name.endswith("_scales"):
        whole = tensor.transpose(1, 2).contiguous().numpy()
        parts = (
            {"down": whole} if "down" in name else {"gate": whole[:, 0::2], "up": whole[:, 1::2]}
        )
        for part, data in parts.items():
            writer.add_tensor(stem.format(part) + ".weight", np.ascontiguousarray(data))


def _in_ggml_order(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray[Any, Any]:
    """Blocks [E, N, blocks, 16] of neighbours → [E, N, blocks * 17], as ggml has them."""
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    return torch.cat([scales[..., None], halves], dim=-1).flatten(-2).numpy()


@pytest.mark.parametrize("kind", ["packed", "expanded"])
def test_a_file_is_the_checkpoint_that_it_was_made_of(
    kind: str, folders: Path, tmp_path: Path
) -> None:
    file = write(folders / kind, tmp_path / "model.gguf")
    theirs = convert(folders / kind, tmp_path / "theirs")
    ours = convert(file, tmp_path / "ours")
    found, expected = (
        facts(registry.read_config(folder)) | {"quantization": None} for folder in (ours, theirs)
    )
    assert found == expected
    stored, published = (load_file(each / "weights.safetensors") for each in (ours, theirs))
    assert stored.keys() == published.keys()
    assert ("layers.0.experts_down.mxfp4" in stored) == (kind == "packed")
    for name, tensor in published.items():
        assert torch.equal(stored[name], tensor), name


def test_a_file_in_mxfp4_answers_as_the_checkpoint(folders: Path, tmp_path: Path) -> None:
    answers = []
    for source in (write(folders / "packed", tmp_path / "model.gguf"), folders / "packed"):
        engine = SmallEngine(convert(source, tmp_path / source.stem))
        [answer] = engine.answer([PROMPT], greedy(8, num_logprobs=2))
        engine.close()
        answers.append((answer.token_ids, answer.logprobs))
    assert answers[0] == answers[1]


def test_scales_above_2_are_refused(folders: Path, tmp_path: Path) -> None:
    file = GgufFile(write(folders / "packed", tmp_path / "model.gguf", scale=129))
    with pytest.raises(ConfigError, match=r"ffn_\w+_exps.weight is 'up to 129'; allowed: at most"):
        list(file.tensors())
