"""Weights in GGUF's block formats: packed from the file to the product, or expanded to the bits of
before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.layers.linear.blocks import BlockLinear
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.models.packed_folder import pack_folder
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.kernels.quant.block_formats import Q4_1, Q6_K, Q8_0, pack
from tests.engine_core.small_models import SmallEngine, convert, expanded, greedy, random_checkpoint
from tests.engine_core.test_weights import write_gguf
from tests.kernels.random_blocks import random_rows
from tests.long_values import long_but

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Which the `gguf` package writes."""
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9]]
CPU = torch.device("cpu")


def write(tmp_path: Path, kind: str, dtype: str = "float32", family: str = "llama2") -> Path:
    """A converted GGUF file, `ours`, and a converted checkpoint of the same weights expanded,
    `expanded`."""
    random_checkpoint(family, tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", gguf.GGMLQuantizationType[kind])
    dense = {
        name: tensor.contiguous()
        for name, tensor in expanded(GgufFile(tmp_path / "model.gguf")).items()
    }
    save_file(dense, tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "expanded", dtype)
    return convert(tmp_path / "model.gguf", tmp_path / "ours", dtype)


def loaded(folder: Path) -> Weights:
    config = registry.read_config(folder)
    tensors = model_file.load(folder, CPU, keeps_packed=True)
    return load_weights(model_class(config).layout(config), tensors, torch.float32)


def answers(folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[Any]:
    """Tokens, and log probabilities of prompts and tokens."""
    engine = SmallEngine(folder, **options)
    found = engine.answer(prompts, greedy(12, num_logprobs=5, num_prompt_logprobs=5))
    engine.close()
    return [(each.token_ids, each.logprobs + each.prompt_logprobs) for each in found]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_stays_packed_with_its_embedding_and_head_and_is_no_larger(
    kind: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, kind)
    weights = loaded(folder)
    assert {linear.kind for linear in weights.linears.values()} == {BlockLinear.kind}
    assert set(weights.tables) == {"embed"}
    assert weights.table("embed").dtype == torch.float32
    size = (folder / model_file.WEIGHTS_NAME).stat().st_size
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    assert (
        sum(tensor.n_bytes for tensor in tensors)
        < size
        < 1.03 * (tmp_path / "model.gguf").stat().st_size
    )


@pytest.mark.parametrize("dtype", long_but(("float32", "bfloat16"), "bfloat16"))
@pytest.mark.parametrize("kind", long_but(("Q4_1", "Q5_0", "Q8_0"), "Q4_1", "Q8_0"))
def test_with_activations_of_the_model_a_file_answers_as_its_weights_expanded_to_the_bit(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, kind, dtype)
    ours, dense = (model_file.load(each, CPU) for each in (folder, tmp_path / "expanded"))
    assert ours.keys() == dense.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in dense.items())
    assert answers(folder, activation_dtype="model") == answers(tmp_path / "expanded")


@pytest.mark.parametrize("kind", long_but(KINDS, "Q4_0"))
def test_with_activations_in_8_bits_answers_are_close_and_not_the_same(
    kind: str, tmp_path: Path
) -> None:
    """Random weights make logits of tens, so the log probabilities of a prompt differ by a tenth or
    two."""
    folder = write(tmp_path, kind)
    prompt = list(range(3, 203))
    engines = [SmallEngine(folder, activation_dtype=each) for each in ("auto", "model")]
    short, exact = (
        engine.answer([prompt], greedy(1, num_prompt_logprobs=0))[0].prompt_logprobs
        for engine in engines
    )
    gaps = np.array([a.logprob - b.logprob for a, b in zip(short, exact, strict=True)])
    spread = np.std([entry.logprob for entry in exact])
    assert 0.001 < np.abs(gaps).mean() / spread < 0.1


def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, "Q4_1", "bfloat16")
    prompts = [[5 + i, 6, 7, *range(3, 3 + 5 * i)] for i in range(20)]
    together = answers(folder, prompts)
    assert together == answers(folder, prompts, num_threads=2, max_num_batched_tokens=70)
    assert together[7:8] == answers(folder, prompts[7:8])


def test_projections_of_several_formats_are_joined_and_plain_parts_are_expanded_to(
    tmp_path: Path,
) -> None:
    weights = {"q_proj": (Q4_1, 40), "k_proj": (Q8_0, 16), "v_proj": (Q6_K, 8)}
    parts = {
        f"model.layers.0.self_attn.{n}.weight": pack(random_rows(f, rows, 256), f)
        for n, (f, rows) in weights.items()
    }
    names = model_class(_config(tmp_path)).names
    collected = names.collect(parts.items(), torch.float32, lambda done: None)
    assert collected["layers.0.qkv.parts"].tolist() == [[3, 40, 256], [8, 16, 256], [14, 8, 256]]
    plain = {
        name: torch.ones(16, 256) if "k_proj" in name else part for name, part in parts.items()
    }
    joined = names.collect(plain.items(), torch.float32, lambda done: None)["layers.0.qkv"]
    assert (joined.shape, joined[45, 3]) == ((64, 256), 1)


def _config(tmp_path: Path) -> Any:
    random_checkpoint("llama2", tmp_path / "hf")
    return registry.read_config(tmp_path / "hf")


@pytest.mark.parametrize(
    ("name", "change", "reported"),
    [
        ("layers.1.down.blocks", lambda tensor: tensor[:-1], r"layers.1.down.blocks is \(5119,\); allowed: \(5120,\)"),
        ("layers.1.down.blocks", lambda tensor: tensor.char(), r"dtype of tensor layers.1.down.blocks is torch.int8"),
        ("layers.1.down.parts", lambda tensor: tensor * 2, r"type of block weights of layers.1.down is 6|rows"),
        ("layers.1.down.parts", lambda tensor: tensor[0], r"parts of block weights of layers.1.down is .*int32"),
        ("layers.0.qkv.parts", lambda tensor: tensor + torch.tensor([0, 1, 0]).int(), r"layers.0.qkv is .* 192 rows"),
        ("embed.parts", lambda tensor: tensor.repeat(2, 1), r"of embed is .*; allowed: 512 rows of 64 inputs"),
        ("embed.parts", lambda tensor: None, r"checkpoint is 'without embed.parts'"),
    ],
)  # fmt: skip
def test_a_weight_that_does_not_fit_is_refused_by_its_name(
    name: str, change: Any, reported: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, "Q4_1")
    tensors = load_file(folder / model_file.WEIGHTS_NAME)
    tensors |= {name: change(tensors.pop(name))}
    kept = {key: tensor.contiguous() for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / model_file.WEIGHTS_NAME)
    with pytest.raises(ConfigError, match=reported):
        loaded(folder)


def test_only_a_cpu_with_packed_weights_takes_int8_activations(tmp_path: Path) -> None:
    folder = write(tmp_path, "Q4_1")
    options = ExecutorOptions(model_folder=folder, activation_dtype="int8")
    assert checked(options, "cpu", cpu.capabilities).activations == "int8"
    assert (
        checked(replace(options, activation_dtype="auto"), "cpu", cpu.capabilities).activations
        == "int8"
    )
    assert (
        checked(replace(options, activation_dtype="model"), "cpu", cpu.capabilities).activations
        == "float32"
    )
    with pytest.raises(
        ConfigError, match="activation_dtype is 'int8'; allowed: auto or model on the platform cuda"
    ):
        checked(options, "cuda", cuda.capabilities)
    assert (
        checked(replace(options, activation_dtype="auto"), "cuda", cuda.capabilities).activations
        == "float32"
    )
    for other in (
        replace(options, model_folder=tmp_path / "expanded"),
        replace(options, load_format="dummy"),
    ):
        with pytest.raises(
            ConfigError,
            match="activation_dtype is 'int8'; allowed: auto or model, for a model whose",
        ):
            checked(other, "cpu", cpu.capabilities)


def test_numerics_ids_differ_by_activations(tmp_path: Path) -> None:
    folder = write(tmp_path, "Q4_1")
    ids = {}
    for activations in ("auto", "int8", "model"):
        options = ExecutorOptions(
            model_folder=folder, num_threads=1, num_blocks=600, activation_dtype=activations
        )
        executor, _, facts = build_executor(options, lambda phase, done, total: None)
        executor.close()
        ids[activations] = facts.numerics_id
    assert ids["auto"] == ids["int8"] != ids["model"]


def test_packing_a_folder_for_others_leaves_packed_weights_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, "Q4_1")
    pack_folder(folder, lambda done, total: None)
    assert not list(folder.glob("packed-*"))
    answers(folder, activation_dtype="model")
    assert len(list(folder.glob("packed-*"))) == 1
