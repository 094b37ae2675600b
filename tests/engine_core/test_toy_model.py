"""A model and a kind of weights come from outside: an entry point, and no file of Headwater's is
touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.formats.gguf_families import JOINED, MODEL_NAMES
from tests.engine_core import toy_model
from tests.engine_core.small_models import SHAPE, SmallEngine, convert, greedy
from tests.engine_core.toy_model import SignLinear, Toy

CONFIG = SHAPE | {"architectures": [toy_model.NAME], "rms_norm_eps": 1e-6}
PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 2, 17, 64, 100)]
NUM_TOKENS = 10


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random checkpoint in Hugging Face's layout, of an architecture that a distribution
    brings."""
    installed = tmp_path / "site" / "toy-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    entry = f"[{registry.ENTRY_POINTS}]\n{toy_model.NAME} = {toy_model.__name__}:ARCHITECTURE\n"
    (installed / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path / "site")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    ours = Toy.layout(registry.config_of(CONFIG))
    theirs = {name: hf for hf, name in (Toy.names.model | Toy.names.layer).items()}
    tensors = {}
    for name, spec in ours.items():
        stem = name.split(".")[-1]
        prefix = "" if stem == name else f"model.{name.removesuffix(stem)}"
        values = torch.randn(spec.shape, generator=generator) * 0.3
        tensors[prefix + theirs[stem]] = values + 1 if spec.is_norm else values
    save_file(tensors, folder / "model.safetensors")
    return folder


def answers(folder: Path) -> list[list[int]]:
    engine = SmallEngine(folder)
    found = engine.tokens(PROMPTS, greedy(NUM_TOKENS))
    engine.close()
    return found


def test_an_architecture_from_an_entry_point_is_converted_and_served(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = convert(checkpoint, tmp_path / "ours")
    tensors = {
        name: tensor.double()
        for name, tensor in model_file.load(folder, torch.device("cpu")).items()
    }
    assert answers(folder) == [_reference(tensors, prompt) for prompt in PROMPTS]


def test_a_gguf_file_of_an_architecture_from_an_entry_point_is_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    names = {theirs: f"{ours}.weight" for ours, theirs in JOINED.items()}
    names |= {theirs.removesuffix(".weight"): ours for ours, theirs in MODEL_NAMES.items()}
    writer = gguf.GGUFWriter(tmp_path / "toy.gguf", "toy")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        stem = names[name.removesuffix(".weight") if layer is None else layer[2]]
        writer.add_tensor(stem if layer is None else f"blk.{layer[1]}.{stem}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    of_file = convert(tmp_path / "toy.gguf", tmp_path / "of file")
    of_folder = convert(checkpoint, tmp_path / "of folder")
    assert registry.read_config(of_file).architecture == toy_model.NAME
    weights = "weights.safetensors"
    assert (of_file / weights).read_bytes() == (of_folder / weights).read_bytes()


def test_layers_take_the_kind_that_their_tensors_belong_to(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = convert(checkpoint, tmp_path / "ours")
    tensors = model_file.load(folder, torch.device("cpu"))
    signed = {}
    widened = {}
    for name, tensor in tensors.items():
        if name.endswith(("qkv", "down")):
            scales = tensor.abs().mean(1)
            signs = tensor.sign().to(torch.int8)
            signed |= {f"{name}.signs": signs, f"{name}.scales": scales}
            widened[name] = signs.double() * scales.double()[:, None]
        else:
            signed[name] = tensor
            widened[name] = tensor.double()
    layout = Toy.layout(registry.read_config(folder))
    kinds = {
        name: linear.kind
        for name, linear in load_weights(layout, signed, torch.float32).linears.items()
    }
    assert kinds["layers.0.qkv"] == SignLinear.kind
    assert kinds["layers.0.o"] == "dense"
    (folder / model_file.WEIGHTS_NAME).unlink()
    model_file.save(signed, folder)
    found = answers(folder)
    assert found == [_reference(widened, prompt) for prompt in PROMPTS]
    assert found != [
        _reference({n: t.double() for n, t in tensors.items()}, prompt) for prompt in PROMPTS
    ]


def test_a_tensor_of_a_wrong_type_is_refused_by_its_name(checkpoint: Path, tmp_path: Path) -> None:
    folder = convert(checkpoint, tmp_path / "ours")
    tensors = model_file.load(folder, torch.device("cpu"))
    layout = Toy.layout(registry.read_config(folder))
    weight = tensors.pop("layers.1.o")
    with pytest.raises(ConfigError, match=r"without layers\.1\.o"):
        load_weights(layout, tensors, torch.float32)
    tensors |= {"layers.1.o.signs": weight, "layers.1.o.scales": weight[:, 0].contiguous()}
    with pytest.raises(
        ConfigError, match=r"dtype of tensor layers\.1\.o\.signs is torch\.float32.*torch\.int8"
    ):
        load_weights(layout, tensors, torch.float32)
    tensors["layers.1.o.signs"] = weight[:5].to(torch.int8)
    with pytest.raises(
        ConfigError, match=r"tensor layers\.1\.o\.signs is \(5, 64\); allowed: \(64, 64\)"
    ):
        load_weights(layout, tensors, torch.float32)


def _reference(weights: dict[str, torch.Tensor], prompt: list[int]) -> list[int]:
    """The likeliest tokens, in plain torch."""
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(_logits(weights, torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]


def _logits(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    heads = 4
    kv_heads = 2
    dim = 16
    eps = CONFIG["rms_norm_eps"]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    angles = torch.outer(
        torch.arange(len(ids)).double(), 10_000.0 ** -(torch.arange(0, dim, 2).double() / dim)
    )
    cos = angles.cos().repeat(1, 2)
    sin = angles.sin().repeat(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    hidden = weights["embed"][ids]
    for i in range(CONFIG["num_hidden_layers"]):
        own = {name.removeprefix(f"layers.{i}."): weight for name, weight in weights.items()}
        x = normed(hidden, own["input_norm"])
        q, k, v = (x @ own["qkv"].T).split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        queries = turned(q.view(-1, heads, dim).transpose(0, 1))
        keys = turned(k.view(-1, kv_heads, dim).transpose(0, 1))
        shared = (keys, v.view(-1, kv_heads, dim).transpose(0, 1))
        keys, values = (each.repeat_interleave(heads // kv_heads, dim=0) for each in shared)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True
        )
        gates, ups = (x @ own["gate_up"].T).chunk(2, dim=1)
        gated = (torch.nn.functional.silu(gates) * ups) @ own["down"].T
        hidden = hidden + attended.transpose(0, 1).flatten(1) @ own["o"].T + gated
    return normed(hidden, weights["final_norm"]) @ weights["lm_head"].T
