"""Folders of adapters: what is read, and what is refused in a sentence, at no cost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.layers.adapters.slab_layout import SlabLayout
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights.adapters import content
from headwater.engine_core.weights.adapters.adapter import Adapter
from headwater.engine_core.weights.adapters.peft_config import config_of
from headwater.engine_core.weights.adapters.peft_folder import read_adapter
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.kernels.adapters.slab import of_layer
from tests.engine_core.small_adapters import CONFIG, QWEN3_LAYERS, tensors_of, write_adapter
from tests.engine_core.small_models import FAMILIES
from tests.longest_hold import longest_hold

PREFIX = "base_model.model.model.layers.0"
A = f"{PREFIX}.mlp.up_proj.lora_A.weight"
B = f"{PREFIX}.mlp.up_proj.lora_B.weight"
ONE = ("mlp.up_proj",)


def config_of_family(family: str) -> ModelConfig:
    made = FAMILIES[family]()
    made.architectures = [registry_name(made)]
    return registry.config_of(made.to_dict())


def read(folder: Path, family: str = "qwen3") -> Adapter:
    config = config_of_family(family)
    found = model_class(config)
    return read_adapter(folder, found.layout(config), found.names)


def registry_name(config: Any) -> str:
    return {"qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM"}[config.model_type]


def up(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Factors of one layer, some of them others."""
    tensors = tensors_of(1, 4, ONE, num_layers=1)
    for name, tensor in {A: changed.get("a", tensors[A]), B: changed.get("b", tensors[B])}.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    return tensors


def test_factors_are_found_by_layer_and_place_among_joined_projections(tmp_path: Path) -> None:
    tensors = tensors_of(1)
    found = read(write_adapter(tmp_path, tensors))
    assert found.rank == 4
    assert len(found.projections) == 3 * len(QWEN3_LAYERS)
    gate, upper = (found.projections["layers.2.gate_up", part] for part in (0, 1))
    prefix = "base_model.model.model.layers.2.mlp"
    assert torch.equal(gate.a, tensors[f"{prefix}.gate_proj.lora_A.weight"])
    assert torch.equal(upper.b, tensors[f"{prefix}.up_proj.lora_B.weight"])
    assert gate.factor == 2.0


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"up_proj": 2}}, 0.5),
        ({"alpha_pattern": {r"layers\.1\.mlp\.up_proj": 2}}, 2.0),
        ({"r": 8, "rank_pattern": {"mlp.up_proj": 4}}, 2.0),
    ],
    ids=str,
)
def test_a_factor_is_alpha_over_the_rank(
    fields: dict[str, Any], factor: float, tmp_path: Path
) -> None:
    found = read(write_adapter(tmp_path, up(), **fields))
    assert found.projections["layers.0.gate_up", 1].factor == factor


def test_projections_that_are_published_joined_share_their_first_factor(tmp_path: Path) -> None:
    """Phi 3 has one tensor for queries, keys and values."""
    size = 64 + 2 * 32
    tensors = {
        f"{PREFIX}.self_attn.qkv_proj.lora_A.weight": torch.randn(4, 64),
        f"{PREFIX}.self_attn.qkv_proj.lora_B.weight": torch.randn(size, 4),
    }
    found = read(write_adapter(tmp_path, tensors), "phi3").projections
    assert [found["layers.0.qkv", part].b.shape[0] for part in range(3)] == [64, 32, 32]
    assert all(torch.equal(each.a, next(iter(tensors.values()))) for each in found.values())


def test_the_hash_is_that_of_the_content(tmp_path: Path) -> None:
    first = read(write_adapter(tmp_path / "a", up())).digest
    assert read(write_adapter(tmp_path / "b", up())).digest == first
    assert read(write_adapter(tmp_path / "c", up(), lora_alpha=9)).digest != first
    changed = up()
    changed[B][0, 0] += 1
    assert read(write_adapter(tmp_path / "d", changed)).digest != first


def test_a_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "PIECE_BYTES", 64)
    for size in (0, 10, 64, 1000):
        written = bytes(i % 251 for i in range(size))
        (tmp_path / "file").write_bytes(written)
        assert bytes(content.read_file(tmp_path / "file", 1000)) == written


def test_other_threads_run_while_a_file_is_read(tmp_path: Path) -> None:
    """Zeros for a buffer of 64 MB, written by one call of native code, took 29 ms."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    assert longest_hold(lambda: content.read_file(path, 64 << 20), 0.008) <= 0.008


def test_ranks_and_projections_that_an_adapter_lacks_are_packed_as_zeros(tmp_path: Path) -> None:
    adapter = read(write_adapter(tmp_path, up()))
    config = config_of_family("qwen3")
    slabs = SlabLayout(model_class(config).layout(config), torch.bfloat16)
    packed = slabs.pack(adapter)
    ((name, part), low_rank), *_ = adapter.projections.items()
    layer = slabs.layers[name]
    of_ranks = of_layer(packed.numbers, packed.num_ranks, layer)
    first = part * layer.num_inputs
    rank = len(low_rank.a)
    assert torch.equal(
        of_ranks[:rank, first : first + layer.num_inputs], low_rank.a.to(torch.bfloat16)
    )
    assert rank < packed.num_ranks
    assert int((packed.numbers != 0).sum()) == int(
        (low_rank.a != 0).sum() + (low_rank.b != 0).sum()
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; allowed: LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type is .*; allowed: CAUSAL_LM"),
        ({"use_dora": True}, "'?use_dora'? is 'True'; allowed: false: DoRA is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is"),
        ({"bias": "all"}, "bias is .*; allowed: none"),
        ({"lora_bias": True}, "lora_bias is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is .*leaves the base model as it is"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters is"),
        ({"new_arithmetic": 3}, "new_arithmetic.*does not know the field"),
        ({"r": 0}, "r is '0'; allowed: 1…256"),
        ({"r": 10**9}, "r is '1000000000'; allowed: 1…256"),
        ({"r": True}, "r is 'True'; allowed: 1…256"),
        ({"lora_alpha": float("nan")}, "lora_alpha is 'nan'"),
        ({"lora_alpha": 10**400}, "lora_alpha is '1000.*\\.\\.\\.'"),
        ({"rank_pattern": {"(a*)*b": 4}}, "rank_pattern is .*at most 2 repeats"),
        ({"rank_pattern": {"up_proj": 999}}, "rank_pattern of up_proj is '999'"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern is .*regular expressions"),
        ({"target_modules": 5}, "target_modules is '5'"),
        ({"target_modules": ["x"] * 5000}, "target_modules is '5000 names'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_served_is_refused_by_its_field(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(CONFIG | fields)


@pytest.mark.parametrize(
    ("tensors", "fields", "words"),
    [
        (lambda: up(a=torch.randn(5, 64)), {}, r"shape of adapter tensor .*\(5, 64\).*\(4, 64\)"),
        (lambda: up(b=torch.randn(64, 4)), {}, r"shape of adapter tensor .*\(128, 4\)"),
        (lambda: up(a=torch.randn(4, 1, 64)), {}, "shape of adapter tensor"),
        (lambda: up(b=None), {}, "adapter of .*up_proj is 'one tensor'; allowed: lora_A and"),
        (lambda: up(a=torch.full((4, 64), torch.nan)), {}, "nan or inf.*finite numbers"),
        (lambda: up(b=torch.full((128, 4), torch.inf)), {}, "nan or inf.*finite numbers"),
        (lambda: up(a=torch.zeros(4, 64, dtype=torch.int32)), {}, "dtype of tensor .*I32"),
        (up, {"target_modules": ["q_proj"]}, "adapter tensor .*layers of target_modules"),
        (lambda: {A.replace("layers.0", "layers.7"): torch.randn(4, 64)}, {}, "linear layers of"),
        (lambda: {A.replace("up_proj", "other"): torch.randn(4, 64)}, {}, "linear layers of the"),
        (
            lambda: {"base_model.model.lm_head.lora_A.weight": torch.randn(4, 64)},
            {},
            "adapters of the vocabulary head are not served",
        ),
        (
            lambda: {"base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, 64)},
            {},
            "adapters of embeddings are not served",
        ),
        (
            lambda: up() | {f"{PREFIX}.mlp.up_proj.lora_magnitude_vector.weight": torch.ones(128)},
            {},
            "DoRA is not served",
        ),
        (
            lambda: {f"{PREFIX}.mlp.experts.3.up_proj.lora_A.weight": torch.randn(4, 64)},
            {},
            r"layers.0.mlp.experts.3.up_proj.*adapters of experts are not served",
        ),
        (
            # PEFT's name of an adapter of a parameter that holds all experts.
            lambda: {f"{PREFIX}.mlp.experts.base_layer.lora_A.weight": torch.randn(32, 64)},
            {},
            r"layers.0.mlp.experts.*adapters of experts are not served",
        ),
        (lambda: {"../../etc/passwd": torch.ones(1)}, {}, "allowed: lora_A.weight and"),
        (lambda: {"x" * 100_000: torch.ones(1)}, {}, "adapter tensor is 'x{256}'"),
        (dict, {}, "a file with tensors"),
    ],
)
def test_tensors_that_are_not_served_are_refused_by_name(
    tensors: Callable[[], dict[str, torch.Tensor]],
    fields: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    write_adapter(tmp_path, tensors(), **fields)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path)


def _bytes(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _header(**facts: Any) -> bytes:
    text = json.dumps({A: {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, 1024]} | facts})
    return len(text).to_bytes(8, "little") + text.encode()


def _pipe(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "without adapter_config.json"),
        (_bytes("adapter_config.json", b"[" * 100_000), "adapter_config.json.*a file of JSON"),
        (_bytes("adapter_config.json", b"{" + b" " * 300_000), "adapter_config.json is '300001"),
        (_bytes("adapter_model.safetensors", b"\xff" * 8), "a whole file of safetensors"),
        (_bytes("adapter_model.safetensors", b"abc"), "a whole file of safetensors"),
        (_bytes("adapter_model.safetensors", _header()), "a whole file of safetensors"),
        (
            _bytes("adapter_model.safetensors", _header(shape=[10**18, 64])),
            r"shape of adapter tensor .*\(4, 64\)",
        ),
        (_bytes("adapter_model.safetensors", _header(dtype=[1])), "dtype of tensor"),
        (_pipe, "adapter_model.safetensors is 'no regular file'"),
    ],
)
def test_damaged_files_are_refused(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, up())
    damage(tmp_path)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path)


def test_a_file_larger_than_any_adapter_of_the_model_is_not_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, up())
    with (tmp_path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors is '1099511627776 bytes'"):
        read(tmp_path)
