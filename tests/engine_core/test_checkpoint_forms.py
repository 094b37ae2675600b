"""The same weights under other names and in other files are the same model."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import conversion, registry
from tests.engine_core.small_models import convert, random_checkpoint

Tensors = dict[str, torch.Tensor]
Rename = Callable[[str], str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    random_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return weights_of(source, tmp_path_factory.mktemp("expected"))


def weights_of(source: Path, folder: Path) -> bytes:
    return (convert(source, folder) / "weights.safetensors").read_bytes()


def tensors_of(source: Path) -> Tensors:
    return load_file(source / "model.safetensors")


def with_config(source: Path, folder: Path, **fields: object) -> Path:
    config = json.loads((source / "config.json").read_text()) | fields
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return folder


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("model.", "model.language_model.", 1),
        lambda name: "language_model." + name,
        lambda name: name.replace("model.layers", "transformer.h", 1),
    ],
    ids=["language_model in model", "model in language_model", "transformer.h"],
)
def test_names_of_other_tools_are_known(
    rename: Rename, source: Path, expected: bytes, tmp_path: Path
) -> None:
    renamed = {
        name if name.startswith("lm_head") else rename(name): tensor
        for name, tensor in tensors_of(source).items()
    }
    folder = with_config(source, tmp_path / "hf")
    save_file(renamed, folder / "model.safetensors")
    assert weights_of(folder, tmp_path / "ours") == expected


def test_joined_projections_are_those_in_parts(
    source: Path, expected: bytes, tmp_path: Path
) -> None:
    tensors = tensors_of(source)
    for i in range(3):
        prefix = f"model.layers.{i}."
        qkv = [tensors.pop(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[prefix + "self_attn.qkv_proj.weight"] = torch.cat(qkv)
        ups = [tensors.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
        tensors[prefix + "mlp.gate_up_proj.weight"] = torch.cat(ups)
    folder = with_config(source, tmp_path / "hf")
    save_file(tensors, folder / "model.safetensors")
    assert weights_of(folder, tmp_path / "ours") == expected


@pytest.mark.parametrize("form", ["pytorch_model.bin", "shards", "another name", "torch shards"])
def test_weights_in_other_files_are_the_same(
    form: str, source: Path, expected: bytes, tmp_path: Path
) -> None:
    tensors = tensors_of(source)
    folder = with_config(source, tmp_path / "hf")
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in names[i::2]} for i in range(2)]
    if form == "pytorch_model.bin":
        torch.save(tensors, folder / form)
    elif form == "another name":
        save_file(tensors, folder / "llama-3-8b.safetensors")
        save_file(tensors, folder / "consolidated.safetensors")
    for i, half in enumerate(halves, start=1):
        if form == "shards":
            save_file(half, folder / f"model-{i:05}-of-00002.safetensors")
        elif form == "torch shards":
            torch.save(half, folder / f"pytorch_model-{i:05}-of-00002.bin")
    assert weights_of(folder, tmp_path / "ours") == expected


def test_a_missing_shard_is_refused_by_the_names_of_the_others(
    source: Path, tmp_path: Path
) -> None:
    folder = with_config(source, tmp_path / "hf")
    save_file(tensors_of(source), folder / "model-00001-of-00002.safetensors")
    with pytest.raises(
        ConfigError, match=r"checkpoint is 'model-00001.*'; allowed: every shard of"
    ):
        convert(folder, tmp_path / "ours")


class Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('code of a checkpoint ran')",)


def test_a_pickled_file_runs_no_code(source: Path, tmp_path: Path) -> None:
    folder = with_config(source, tmp_path / "hf")
    for content in (pickle.dumps(Planted(), protocol=2), b"", b"PK\x03\x04 cut"):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin'; allowed: a whole file of ten"):
            convert(folder, tmp_path / "ours")


@pytest.mark.parametrize(
    "fields",
    [{"architectures": None}, {"architectures": ["Qwen3Model"]}],
    ids=["model_type alone", "base class"],
)
def test_a_checkpoint_without_a_head_ties_it_to_the_embedding(
    fields: dict[str, object], source: Path, tmp_path: Path
) -> None:
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors_of(source).items()
        if name != "lm_head.weight"
    }
    folder = with_config(source, tmp_path / "hf", **fields)
    save_file(tensors, folder / "model.safetensors")
    config = registry.read_config(convert(folder, tmp_path / "ours"))
    assert (config.architecture, config.tie_word_embeddings) == ("Qwen3ForCausalLM", True)


def test_a_missing_head_of_a_model_with_one_is_refused(source: Path, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    del tensors["lm_head.weight"]
    folder = with_config(source, tmp_path / "hf")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="checkpoint is 'without lm_head'"):
        convert(folder, tmp_path / "ours")


def test_tensors_of_towers_and_drafting_layers_are_left_out_and_listed(
    source: Path, expected: bytes, tmp_path: Path
) -> None:
    tensors = tensors_of(source)
    spare = {
        name.replace("layers.0", "layers.3"): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.0." in name
    }
    others = ["model.visual.blocks.0.w", "model.visual.blocks.1.w", "mtp.fc.weight"]
    others += ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    folder = with_config(source, tmp_path / "hf", num_nextn_predict_layers=1)
    stored = tensors | spare | {name: torch.ones(1) for name in others}
    save_file(stored, folder / "model.safetensors")
    (tmp_path / "ours").mkdir()
    converted = conversion.convert(
        folder, tmp_path / "ours", dtype="float32", progress=lambda done, total: None
    )
    assert converted.left_out == "model.layers (13), model.visual.blocks (2), mtp.fc.weight (1)"
    assert (tmp_path / "ours" / "weights.safetensors").read_bytes() == expected
