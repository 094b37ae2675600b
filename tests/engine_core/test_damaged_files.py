"""Files that are cut off, mixed up or missing: one sentence, which names the tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.engine_core.weights.hugging_face import HuggingFaceFolder
from headwater.engine_core.weights.json_object import read_object
from headwater.services.models.gguf_check import GgufFileError, check_gguf
from tests.engine_core.packed_checkpoint import FORMS, write_packed
from tests.engine_core.small_models import convert, random_checkpoint
from tests.engine_core.test_weights import write_gguf


def cut(path: Path, num_bytes: int) -> None:
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - num_bytes)


def fill(path: Path) -> None:
    path.write_bytes(b"\xff" * 400)


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (lambda path: cut(path, 8), r"tensor \S+ of model.safetensors is 'cut off \(8 bytes are missing\)'"),
        (lambda path: os.truncate(path, 700), r"checkpoint file is 'model.safetensors, 700 bytes'; allowed: a whole"),
        (lambda path: os.truncate(path, 5), r"checkpoint file is 'model.safetensors'; allowed: a whole file of safe"),
        (lambda path: os.truncate(path, 0), r"checkpoint file is 'model.safetensors'; allowed: a whole file of safe"),
        (fill, r"checkpoint file is "),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_cut_off_is_refused_in_a_sentence(
    damage: Callable[[Path], None], reported: str, tmp_path: Path
) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    write_packed(
        tmp_path / "hf", tmp_path / "packed", tmp_path / "expanded", FORMS["gptq"], torch.float32
    )
    damage(tmp_path / "packed" / "model.safetensors")
    with pytest.raises(ConfigError, match=reported) as caught:
        convert(tmp_path / "packed", tmp_path / "ours")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "secret",
    [
        b"hunter2\0" + bytes(40),
        b"\x39\x30\x00\x00\x00\x00\x00\x00 and what follows",
        struct.pack("<Q", 22) + b'{"password":"hunter2"}' + bytes(8),
        struct.pack("<Q", 29) + b'{"t":{"dtype":"hunter\\"2","a"}' + bytes(8),
    ],
)
def test_a_link_to_another_file_is_refused_without_a_word_of_it(
    secret: bytes, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(secret)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="allowed: a whole file of safetensors") as caught:
        list(HuggingFaceFolder(folder).tensors())
    sent = str(caught.value).replace(f"{len(secret)} bytes", "")
    for part in ("hunter", "password", str(int.from_bytes(secret[:8], "little") + 8), "12345"):
        assert part not in sent


def test_a_linked_file_in_place_of_a_config_is_refused_without_a_byte_of_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"{\xc3(")
    (tmp_path / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"\(byte 1 of it is not UTF-8\)") as caught:
        read_object(tmp_path / "config.json")
    assert "c3" not in str(caught.value)


def test_a_pointer_of_git_lfs_is_refused_as_what_it_is(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ConfigError, match="this one is a pointer of Git LFS: `git lfs pull`"):
        list(HuggingFaceFolder(tmp_path).tensors())


def test_the_tensor_at_the_cut_is_the_one_that_is_named(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.ones(100) for i in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    cut(tmp_path / "model.safetensors", 500)
    with pytest.raises(
        ConfigError, match=r"tensor t1 of model.safetensors is 'cut off \(100 bytes are missing\)'"
    ):
        list(HuggingFaceFolder(tmp_path).tensors())


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf", max_shard_size="100KB")
    names = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    (tmp_path / "hf" / names[1]).unlink()
    with pytest.raises(
        ConfigError,
        match=rf"checkpoint is 'without {names[1]}'; allowed: every file that its index",
    ):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_shards_are_read_as_they_arrive(tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path, max_shard_size="100KB")
    whole = dict(HuggingFaceFolder(tmp_path).tensors())
    shards = sorted(tmp_path.glob("*.safetensors"))
    coming = [each.rename(tmp_path / f"coming-{each.name}") for each in shards]
    (marker := tmp_path / "arriving").touch()
    arriving = HuggingFaceFolder(tmp_path, arriving=marker)
    assert len(arriving) == len(whole)
    assert arriving.names() == whole.keys()
    coming[0].rename(shards[0])
    tensors = arriving.tensors()
    # The others are not there yet.
    found = dict([next(tensors)])
    for path, shard in zip(coming[1:], shards[1:], strict=True):
        path.rename(shard)
    found |= dict(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    shards[1].unlink()
    marker.unlink()
    with pytest.raises(ConfigError, match=rf"checkpoint is 'without {shards[1].name}'"):
        list(arriving.tensors())


@pytest.mark.parametrize("has_shards", [True, False])
def test_a_model_that_was_saved_in_one_file_over_its_shards_is_that_file(
    has_shards: bool, tmp_path: Path
) -> None:
    random_checkpoint("llama2", tmp_path, max_shard_size="100KB")
    shards = list(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor + 1 for path in shards for name, tensor in load_file(path).items()}
    for path in () if has_shards else shards:
        path.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    found = dict(HuggingFaceFolder(tmp_path).tensors())
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_shard_in_anothers_place_is_refused_by_a_tensor_that_is_missing(tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf", max_shard_size="100KB")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    name = index["model.layers.1.mlp.down_proj.weight"]
    kept = {
        key: tensor
        for key, tensor in load_file(tmp_path / "hf" / name).items()
        if "layers.1.mlp.down" not in key
    }
    save_file(kept, tmp_path / "hf" / name)
    with pytest.raises(ConfigError, match=r"without layers\.1\.down"):
        convert(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_tensor_that_is_in_two_shards_is_refused_before_either_is_read(
    name: str, tmp_path: Path
) -> None:
    """The one that is read last would count, in silence."""
    random_checkpoint("llama2", tmp_path / "hf", max_shard_size="100KB")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    first = index[name]
    second = next(file for file in index.values() if file != first)
    tensor = load_file(tmp_path / "hf" / first)[name]
    save_file({**load_file(tmp_path / "hf" / second), name: tensor + 1}, tmp_path / "hf" / second)
    files = " and ".join(sorted([first, second]))
    with pytest.raises(
        ConfigError, match=f"file of tensor {name} is '{files}'; allowed: one of them"
    ):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_a_shard_that_is_a_folder_is_named(tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf", max_shard_size="100KB")
    shard = min((tmp_path / "hf").glob("*.safetensors"))
    shard.unlink()
    shard.mkdir()
    with pytest.raises(
        ConfigError, match=f"checkpoint file is '{shard.name}'; allowed: a file that can be read"
    ):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_a_tensor_of_a_type_that_torch_has_not_is_named(tmp_path: Path) -> None:
    header = json.dumps(
        {"t": {"dtype": "F6_E2M3", "shape": [128], "data_offsets": [0, 96]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(96)
    )
    with pytest.raises(
        ConfigError,
        match="type of tensor t is 'Dtype not understood: F6_E2M3'; allowed: a type that",
    ):
        list(HuggingFaceFolder(tmp_path).tensors())


@pytest.mark.parametrize(
    ("names", "reported"),
    [
        (
            ("mlp.gate_proj", "mlp.up_proj"),
            r"outputs of the parts of layers.1.gate_up is \(136, 120\); allowed: \(128,",
        ),
        (
            ("self_attn.k_proj", "self_attn.v_proj"),
            r"outputs of the parts of layers.1.qkv is \(64, 72, 56\); allowed",
        ),
    ],
)
def test_parts_whose_sizes_are_wrong_and_whose_sum_is_right_are_refused(
    names: tuple[str, str], reported: str, tmp_path: Path
) -> None:
    """They are one matrix here, whose rows would be taken for those of the other part."""
    random_checkpoint("llama2", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    first, second = (f"model.layers.1.{name}.weight" for name in names)
    moved = {
        first: torch.cat((tensors[first], tensors[second][:8])),
        second: tensors[second][8:].clone(),
    }
    save_file(tensors | moved, path)
    with pytest.raises(ConfigError, match=reported):
        convert(tmp_path / "hf", tmp_path / "ours")


ODD_FACTORS = np.array([1, 1, 1, 2, 3, 5, 7, 9], np.float32)
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERIES = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "reported"),
    [
        (
            DOWN,
            torch.ones(64, 128, dtype=torch.int8),
            f"dtype of tensor {DOWN} is 'torch.int8'; allowed: weights in",
        ),
        (
            DOWN,
            torch.ones(64, 128, dtype=torch.bool),
            f"dtype of tensor {DOWN} is 'torch.bool'; allowed: weights in",
        ),
        (
            DOWN,
            torch.ones(64, 64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            f"dtype of tensor {DOWN} is 'torch.flo",
        ),
        (
            QUERIES,
            torch.ones(64, 32),
            "shapes of the parts of layers.0.qkv is .*; allowed: one number of inputs",
        ),
        (
            QUERIES,
            torch.ones(64),
            "shapes of the parts of layers.0.qkv is .*; allowed: one number of inputs",
        ),
        (
            QUERIES,
            torch.ones(()),
            "shapes of the parts of layers.0.qkv is .*; allowed: one number of inputs",
        ),
    ],
)
def test_a_tensor_that_is_no_weight_of_its_layer_is_named(
    name: str, tensor: torch.Tensor, reported: str, tmp_path: Path
) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    save_file({**load_file(path), name: tensor}, path)
    with pytest.raises(ConfigError, match=reported):
        convert(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize("shape", [(512, 64), (500, 64)])
def test_a_head_of_its_own_beside_a_config_that_ties_it_is_refused(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    """transformers 5 serves that head, version 4 the embedding."""
    random_checkpoint("smollm2", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    same = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": same}, path)
    convert(tmp_path / "hf", tmp_path / "same")
    save_file(tensors | {"lm_head.weight": torch.ones(shape)}, path)
    with pytest.raises(
        ConfigError,
        match="tie_word_embeddings is True; allowed: false, or a lm_head of the embedding's",
    ):
        convert(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize("num_bytes", [4, 40_000])
def test_a_converted_folder_that_is_cut_off_is_refused_before_an_engine_is_built(
    num_bytes: int, tmp_path: Path
) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    cut(folder / model_file.WEIGHTS_NAME, num_bytes)
    with pytest.raises(
        ConfigError,
        match=r"tensor \S+ of weights.safetensors is 'cut off \(\d+ bytes are missing\)'",
    ):
        checked(ExecutorOptions(model_folder=folder), cpu.name, cpu.capabilities)


@pytest.mark.parametrize("num_bytes", [64, 60_000])
def test_a_gguf_file_that_is_cut_off_names_the_tensor(num_bytes: int, tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path / "hf", gguf.GGMLQuantizationType.Q4_1)
    check_gguf(path)
    last = max(gguf.GGUFReader(path).tensors, key=lambda tensor: tensor.data_offset).name
    cut(path, num_bytes)
    with pytest.raises(
        GgufFileError, match=r"the tensor \S+ (is cut off: \d+ bytes|begins behind its end)"
    ) as caught:
        check_gguf(path)
    assert num_bytes > 64 or f"the tensor {last} is" in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"checkpoint file is 'model.gguf'; allowed: a whole GGUF file"
    ):
        GgufFile(path)


@pytest.mark.parametrize(
    ("numbers", "others", "without", "reported"),
    [
        (
            {},
            {"rope_factors_long.weight": np.ones(8, np.float32)},
            "",
            "tensor is 'rope_factors_long.weight'; allowed",
        ),
        (
            {},
            {"blk.0.attn_rot_embd": np.ones(8, np.float32)},
            "",
            "tensor is 'blk.0.attn_rot_embd'; allowed: tensors of",
        ),
        (
            {},
            {"enc.0.attn_q.weight": np.ones(8, np.float32)},
            "",
            "tensor is 'enc.0.attn_q.weight'; allowed: tensors",
        ),
        (
            {},
            {},
            "token_embd.weight",
            "checkpoint is 'without the matrix token_embd.weight'; allowed: every tensor",
        ),
        (
            {"llama.rope.dimension_count": 8},
            {},
            "",
            "rope.dimension_count is 8; allowed: 16: all of a head is rotated",
        ),
        (
            {"llama.attention.causal": False},
            {},
            "",
            "attention.causal is False; allowed: true: no token sees later ones",
        ),
        (
            {},
            {"rope_freqs.weight": ODD_FACTORS},
            "",
            r"tensor rope_freqs.weight is \[1.0, .*; allowed: 8 factors of Llama 3",
        ),
        (
            {},
            {"rope_freqs.weight": np.ones(9, np.float32)},
            "",
            "rope_freqs.weight is .*; allowed: 8 factors of Llama 3",
        ),
        (
            {"llama.rope.scaling.factor": 4.0},
            {"rope_freqs.weight": np.ones(8, np.float32)},
            "",
            "tensor is 'rope_freqs.weight'; allowed: none beside linear scaling",
        ),
        (
            {"split.count": 3},
            {},
            "token_embd.weight",
            "split.count is 3; allowed: 1: parts have to be joined",
        ),
    ],
)
def test_a_gguf_file_of_other_tensors_is_refused_by_name(
    numbers: dict[str, float],
    others: dict[str, np.ndarray[Any, Any]],
    without: str,
    reported: str,
    tmp_path: Path,
) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    path = tmp_path / "model.gguf"
    f32 = gguf.GGMLQuantizationType.F32
    write_gguf(path, tmp_path / "hf", f32, numbers=numbers, others=others, without=without)
    with pytest.raises(ConfigError, match=reported):
        convert(path, tmp_path / "ours")
