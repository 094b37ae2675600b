"""Checkpoints of four bits: the same bits as those of the file expanded, and what is refused, by
name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.layers.linear.int4 import Int4Linear
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.dummy import dummy
from headwater.engine_core.weights.formats import awq, gptq
from headwater.engine_core.weights.formats.packing import Packing
from headwater.kernels.quant.int4_layout import Int4Weight, expand
from tests.engine_core.packed_checkpoint import (
    FORMS,
    Form,
    PackedMatrix,
    awq_tensors,
    gptq_tensors,
    write_packed,
)
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.long_values import long_but

PROMPTS = [[5, 6, 7], list(range(3, 60)), [9]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTION = "model.layers.1.self_attn"
MLP = "model.layers.1.mlp"


def write(
    tmp_path: Path, form: str, dtype: str = "float32", family: str = "llama3 with scaled rope"
) -> Path:
    """Folder with both checkpoints."""
    random_checkpoint(family, tmp_path / "hf")
    write_packed(
        tmp_path / "hf", tmp_path / "packed", tmp_path / "expanded", FORMS[form], DTYPES[dtype]
    )
    return tmp_path


def loaded(folder: Path, dtype: torch.dtype) -> Weights:
    config = registry.read_config(folder)
    layout = model_class(config).layout(config)
    return load_weights(layout, model_file.load(folder, torch.device("cpu")), dtype)


def answers(folder: Path, activation_dtype: str = "model") -> list[tuple[list[int], list[Any]]]:
    """Tokens, and log probabilities of prompts and tokens."""
    engine = SmallEngine(folder, activation_dtype=activation_dtype)
    found = engine.answer(PROMPTS, greedy(12, num_logprobs=5, num_prompt_logprobs=5))
    engine.close()
    return [(each.token_ids, each.logprobs + each.prompt_logprobs) for each in found]


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Another tensor in the checkpoint's file; None: none of this name."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(
        tensors if tensor is None else tensors | {name: tensor.contiguous()},
        folder / "model.safetensors",
    )


@pytest.mark.parametrize("form", long_but(FORMS, "gptq", "gptq in act order", "awq"))
@pytest.mark.parametrize("dtype", long_but(DTYPES, "float32"))
def test_a_packed_checkpoint_answers_as_the_same_file_expanded_to_the_bit(
    form: str, dtype: str, tmp_path: Path
) -> None:
    write(tmp_path, form, dtype)
    packed, expanded = (
        convert(tmp_path / name, tmp_path / f"our {name}", dtype) for name in ("packed", "expanded")
    )
    kinds = {name: linear.kind for name, linear in loaded(packed, DTYPES[dtype]).linears.items()}
    assert kinds.pop("lm_head") == "dense"
    assert set(kinds.values()) == {Int4Linear.kind}
    assert answers(packed) == answers(expanded)


@pytest.mark.parametrize("family", long_but(("qwen2", "qwen3", "smollm2", "gemma3"), "gemma3"))
@pytest.mark.long
def test_families_with_biases_norms_and_tied_heads_are_served_packed(
    family: str, tmp_path: Path
) -> None:
    write(tmp_path, "gptq in act order", family=family)
    packed, expanded = (
        convert(tmp_path / name, tmp_path / f"our {name}") for name in ("packed", "expanded")
    )
    assert answers(packed) == answers(expanded)


def test_a_converted_folder_is_as_small_as_the_file(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    folder = convert(tmp_path / "packed", tmp_path / "ours")
    linears = loaded(folder, torch.float32).linears.values()
    packed = [linear.weight for linear in linears if isinstance(linear, Int4Linear)]
    num_bytes = sum(weight.words.nbytes + weight.scales.nbytes for weight in packed)
    num_bytes += sum(weight.zeros.nbytes for weight in packed if weight.zeros is not None)
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    published = sum(
        tensor.nbytes
        for name, tensor in stored.items()
        if not name.endswith("weight") or "qw" in name
    )
    assert published < num_bytes < 1.03 * published


@pytest.mark.parametrize("fault", long_but(("scale", "zero", "order"), "zero"))
def test_a_fault_in_a_single_group_shows_in_the_answers(fault: str, tmp_path: Path) -> None:
    """What the comparison of whole models would miss if it were too kind."""
    write(tmp_path, "gptq")
    sound = answers(convert(tmp_path / "packed", tmp_path / "sound"))
    name = f"{MLP}.down_proj.{ {'scale': 'scales', 'zero': 'qzeros', 'order': 'qweight'}[fault] }"
    tensor = load_file(tmp_path / "packed" / "model.safetensors")[name].clone()
    if fault == "scale":
        tensor[1, 5] *= 1.01
    elif fault == "zero":
        tensor[1, 0] ^= 1
    else:
        tensor[[0, 1]] = tensor[[1, 0]]
    change(tmp_path / "packed", name, tensor)
    assert answers(convert(tmp_path / "packed", tmp_path / "faulty")) != sound


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("form", ["gptq 1", "gptq 0", "gptq 1 in act order", "awq"])
def test_unpacked_layers_are_what_the_definition_says_in_float64(
    form: str, group_size: int
) -> None:
    rng = np.random.default_rng(group_size + 1)
    k = 256
    n = 72
    of_inputs = np.arange(k) // (k if group_size == -1 else group_size)
    of_inputs = rng.permutation(of_inputs) if "order" in form else of_inputs
    matrix = PackedMatrix.random(n, k, group_size, rng, of_inputs, symmetric=False)
    if form == "awq":
        packing = Packing(format="awq", bits=4, group_size=group_size)
        weight = awq.unpack("layer", awq_tensors(matrix), packing)
    else:
        zero_offset = int(form.split()[1])
        packing = Packing(
            format="gptq", bits=4, group_size=group_size, zero_offset=zero_offset, has_order=True
        )
        found = gptq.unpack("layer", gptq_tensors(matrix, zero_offset), packing)
        assert isinstance(found, Int4Weight)
        weight = found
    assert (weight.groups is None) == ("order" not in form or group_size == -1)
    exact = expand(weight, torch.float32)
    assert torch.equal(exact.double(), matrix.expanded())


def test_biases_of_zeros_that_tools_add_are_left_out_and_others_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    plain = answers(convert(tmp_path / "packed", tmp_path / "plain"))
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    widths = {
        name.removesuffix(".scales"): tensor.shape[1]
        for name, tensor in tensors.items()
        if "scales" in name
    }
    biases = {f"{layer}.bias": torch.zeros(width) for layer, width in widths.items()}
    save_file(tensors | biases, tmp_path / "packed" / "model.safetensors")
    assert answers(convert(tmp_path / "packed", tmp_path / "idle")) == plain
    for layer in (f"{MLP}.down_proj", f"{ATTENTION}.q_proj"):
        used = {f"{layer}.bias": torch.ones(widths[layer])}
        save_file(tensors | biases | used, tmp_path / "packed" / "model.safetensors")
        with pytest.raises(ConfigError, match="bias"):
            convert(tmp_path / "packed", tmp_path / "used")


@pytest.mark.parametrize(
    ("form", "changed", "reported"),
    [
        ("gptq", {"bits": 3}, r"quantization_config.bits is 3; allowed: 4 or 8"),
        ("gptq", {"bits": 2}, r"quantization_config.bits is 2; allowed: 4 or 8"),
        ("awq", {"bits": 8}, r"quantization_config.bits is 8; allowed: 4"),
        ("awq as its own tool names fields", {"w_bit": 8}, r"quantization_config.w_bit is 8; allowed: 4"),
        ("gptq", {"group_size": 48}, r"quantization_config.group_size is 48; allowed: 32, 64, 128, -1"),
        ("gptq", {"group_size": None}, r"quantization_config.group_size is None"),
        ("gptq", {"checkpoint_format": "marlin"}, r"quantization_config.checkpoint_format is 'marlin'; .* gptq_v2"),
        ("gptq", {"pack_dtype": "int8"}, r"quantization_config.pack_dtype is 'int8'; allowed: int32"),
        ("gptq", {"lm_head": True}, r"quantization_config.lm_head is True; allowed: False"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"quantization_config.dynamic is .*; allowed: none"),
        ("awq", {"version": "gemv"}, r"quantization_config.version is 'gemv'; allowed: gemm"),
        ("awq", {"zero_point": False}, r"quantization_config.zero_point is False; allowed: True"),
        ("auto-round as gptq", {"packing_format": "auto_round"}, r"packing_format is 'auto_round'; allowed: auto_"),
        ("auto-round as gptq", {"data_type": "mx_fp"}, r"quantization_config.data_type is 'mx_fp'; allowed: int"),
        (
            "auto-round as awq",
            {"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}}},
            r"quantization_config.extra_config.model.layers.0.mlp.down_proj.bits is 8; allowed: 16",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_field_before_any_tensor_is_read(
    form: str, changed: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    write(tmp_path, form)
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"quantization_config": config["quantization_config"] | changed})
    )
    # Nothing that could be read as a tensor.
    (tmp_path / "packed" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=reported):
        convert(tmp_path / "packed", tmp_path / "ours")


@pytest.mark.parametrize(
    ("name", "tensor", "reported"),
    [
        (f"{MLP}.down_proj.qzeros", None, r"without model.layers.1.mlp.down_proj.qzeros"),
        (
            f"{MLP}.down_proj.scales",
            torch.ones(2, 64).half(),
            r"down_proj.scales is \(2, 64\); allowed: \(4, 64\)",
        ),
        (
            f"{MLP}.down_proj.scales",
            torch.ones(4, 64),
            r"down_proj.scales is 'torch.float32'; allowed: torch.float16",
        ),
        (
            f"{MLP}.down_proj.qzeros",
            torch.ones(4, 8),
            r"down_proj.qzeros is 'torch.float32'; allowed: torch.int32",
        ),
        (
            f"{MLP}.down_proj.qweight",
            torch.ones(5, 64).int(),
            r"number of inputs of .*down_proj is 40; allowed: mult",
        ),
        (
            f"{MLP}.down_proj.g_idx",
            torch.full((128,), 4).int(),
            r"down_proj.g_idx is '4…4'; allowed: groups 0…3",
        ),
        (
            f"{MLP}.up_proj.g_idx",
            torch.zeros(64).int(),
            r"g_idx of the parts of layers.1.gate_up is 'different'",
        ),
        (
            f"{ATTENTION}.k_proj.scales",
            torch.ones(2, 32).bfloat16(),
            r"dtypes of the scales of .*layers.1.qkv",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    name: str, tensor: torch.Tensor | None, reported: str, tmp_path: Path
) -> None:
    write(tmp_path, "gptq")
    change(tmp_path / "packed", name, tensor)
    with pytest.raises(ConfigError, match=reported):
        convert(tmp_path / "packed", tmp_path / "ours")


@pytest.mark.parametrize(("version", "read_as", "found"), [(0, "gptq", 9), (1, "gptq_v2", 7)])
def test_a_symmetric_file_of_another_version_than_its_config_says_is_refused(
    version: int, read_as: str, found: int, tmp_path: Path
) -> None:
    """All its zero points would be one off."""
    random_checkpoint("llama2", tmp_path / "hf")
    config = FORMS["gptq"].config | {"sym": True, "checkpoint_format": read_as}
    form = Form(config=config, write=lambda matrix: gptq_tensors(matrix, version), symmetric=True)
    write_packed(tmp_path / "hf", tmp_path / "packed", tmp_path / "expanded", form, torch.float32)
    with pytest.raises(
        ConfigError,
        match=rf"zero points of .*_proj.qzeros is \[{found}\]; allowed: 8 alone, as quanti",
    ):
        convert(tmp_path / "packed", tmp_path / "ours")


def test_auto_round_leaves_out_or_writes_groups_that_are_in_order(tmp_path: Path) -> None:
    write(tmp_path, "auto-round as gptq")
    written = answers(convert(tmp_path / "packed", tmp_path / "written"))
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    name = f"{MLP}.down_proj.g_idx"
    save_file(tensors | {name: tensors[name].flip(0)}, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"down_proj.g_idx is 'not in order'; allowed: groups that follow"
    ):
        convert(tmp_path / "packed", tmp_path / "out of order")
    save_file(tensors | {name: tensors[name][0].clone()}, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"number of inputs of .*down_proj.g_idx is 1; allowed: multiples of 32"
    ):
        convert(tmp_path / "packed", tmp_path / "one number")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    save_file(kept, tmp_path / "packed" / "model.safetensors")
    assert answers(convert(tmp_path / "packed", tmp_path / "left out")) == written


def test_a_packed_head_is_refused_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    query = {
        name: tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(f"{ATTENTION}.q_proj")
    }
    own = {name.replace(f"{ATTENTION}.q_proj", "lm_head"): tensor for name, tensor in query.items()}
    del tensors["lm_head.weight"]
    save_file(tensors | own, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"lm_head.weight'; allowed: embedding and head that are not packed"
    ):
        convert(tmp_path / "packed", tmp_path / "ours")


def test_a_projection_of_which_a_part_is_not_packed_is_expanded(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    kept = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(f"{MLP}.up_proj")
    }
    weight = load_file(tmp_path / "expanded" / "model.safetensors")[f"{MLP}.up_proj.weight"]
    save_file(kept | {f"{MLP}.up_proj.weight": weight}, tmp_path / "packed" / "model.safetensors")
    packed, expanded = (
        convert(tmp_path / name, tmp_path / f"our {name}") for name in ("packed", "expanded")
    )
    kinds = {name: linear.kind for name, linear in loaded(packed, torch.float32).linears.items()}
    assert (kinds["layers.1.gate_up"], kinds["layers.0.gate_up"]) == ("dense", "int4")
    assert answers(packed) == answers(expanded)


def test_layers_that_a_tool_left_out_stay_dense_beside_packed_ones(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    kept = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(f"{MLP}.down_proj")
    }
    weight = load_file(tmp_path / "expanded" / "model.safetensors")[f"{MLP}.down_proj.weight"]
    save_file(kept | {f"{MLP}.down_proj.weight": weight}, tmp_path / "packed" / "model.safetensors")
    packed, expanded = (
        convert(tmp_path / name, tmp_path / f"our {name}") for name in ("packed", "expanded")
    )
    assert loaded(packed, torch.float32).linears["layers.1.down"].kind == "dense"
    assert answers(packed) == answers(expanded)


def test_random_weights_of_a_packed_model_are_packed_too(tmp_path: Path) -> None:
    """So that a packed model is measured without its weights."""
    write(tmp_path, "gptq")
    folder = convert(tmp_path / "packed", tmp_path / "ours")
    config = registry.read_config(folder)
    layout = model_class(config).layout(config)
    device = torch.device("cpu")
    tensors = dummy(layout, torch.float32, device, quantization=config.quantization)
    kinds = {
        name: linear.kind
        for name, linear in load_weights(layout, tensors, torch.float32).linears.items()
    }
    assert kinds.pop("lm_head") == "dense"
    assert set(kinds.values()) == {Int4Linear.kind}
    engine = SmallEngine(folder, load_format="dummy")
    (answer,) = engine.answer([[5, 6, 7]], greedy(4, num_logprobs=1))
    engine.close()
    assert all(math.isfinite(each.logprob) for each in answer.logprobs)


@pytest.mark.long
def test_formats_have_numerics_ids_of_their_own(tmp_path: Path) -> None:
    """Random weights too, whose folders may have one name."""
    ids = set()
    for form in ("gptq", "awq", "gptq, version 2"):
        (tmp_path / form).mkdir()
        write(tmp_path / form, form)
        folder = convert(tmp_path / form / "packed", tmp_path / form / "ours")
        for load_format in ("auto", "dummy"):
            options = ExecutorOptions(
                model_folder=folder, num_threads=1, num_blocks=600, load_format=load_format
            )
            ids.add(_numerics_id(options))
    assert len(ids) == 6


def _numerics_id(options: ExecutorOptions) -> str:
    from headwater.engine_core.executors.build.single import build_executor  # noqa: PLC0415 (as an engine builds it)

    executor, _, facts = build_executor(options, lambda phase, done, total: None)
    executor.close()
    return facts.numerics_id
