"""Weights that are rounded when a model is converted, and methods that are asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.models import conversion, registry
from headwater.engine_core.models.conversion import Converted
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.formats.quantization import KINDS, QUANTIZATIONS
from headwater.engine_core.weights.rounding import ROUNDINGS, round_fp8, round_int4, round_int8
from headwater.kernels.quant import byte_weights, int4_layout
from headwater.services.models.manifest import ROUNDED_KINDS
from tests.engine_core.byte_checkpoint import BYTE_FORMS
from tests.engine_core.packed_checkpoint import FORMS, write_packed
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint

CPU = torch.device("cpu")


def rounded(source: Path, folder: Path, kind: str, dtype: str = "float32") -> Converted:
    folder.mkdir()
    return conversion.convert(
        source, folder, dtype=dtype, progress=lambda done, total: None, quantization=kind
    )


def log_probs(folder: Path, **options: Any) -> list[float]:
    """Log probabilities of a prompt's tokens."""
    engine = SmallEngine(folder, **options)
    answer = engine.answer([list(range(3, 203))], greedy(1, num_prompt_logprobs=0))[0]
    engine.close()
    return [entry.logprob for entry in answer.prompt_logprobs]


@pytest.mark.parametrize("spread", [1.0, 1e-5, 300.0])
def test_a_weight_is_the_nearest_of_its_group(spread: float) -> None:
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(0)) * spread
    weight[3, :64] = 0
    groups = weight.view(48, 6, 32)
    steps = (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15
    found = round_int4(weight)
    assert found is not None
    error = (int4_layout.expand(found, torch.float32) - weight).view(48, 6, 32).abs().amax(2)
    # The zero point is rounded too, and scales have eleven bits: of the tiniest fewer.
    assert (error <= steps + 2e-7).all()
    assert (error[3, 0], error.mean() < 0.6 * steps.mean() + 1e-7) == (0, True)
    groups = weight.view(48, 3, 64)
    eight = round_int8(weight)
    assert eight is not None
    error = (byte_weights.expand(eight, torch.float32) - weight).view(48, 3, 64).abs().amax(2)
    assert (error <= 0.52 * groups.abs().amax(2) / 127 * 1.05 + 1e-5 * spread + 8e-6).all()
    relative = (
        byte_weights.expand(round_fp8(weight), torch.float32) - weight
    ).abs() / weight.abs().clamp(min=1e-30)
    large = weight.abs() > weight.abs().amax(1, keepdim=True) / 1000
    assert relative[large].max() <= 1 / 16 + 1e-6


@pytest.mark.parametrize(
    ("kind", "layers", "most"),
    [("fp8", "f8a8", 0.04), ("int8", "int8", 0.01), ("int4", "int4", 0.15)],
)
def test_a_model_is_rounded_when_it_is_converted(
    kind: str, layers: str, most: float, tmp_path: Path
) -> None:
    random_checkpoint("smollm2", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "plain")
    converted = rounded(tmp_path / "hf", tmp_path / "ours", kind)
    config = registry.read_config(tmp_path / "ours")
    tensors = model_file.load(tmp_path / "ours", CPU, keeps_packed=True)
    linears = load_weights(model_class(config).layout(config), tensors, torch.float32).linears
    assert {name: linear.kind for name, linear in linears.items() if linear.kind != layers} == {
        "lm_head": "dense"
    }
    assert converted.quantization == kind
    assert converted.rounding is not None
    # The file is as small as it was said to be, and weights are as far from those before.
    sizes = [
        sum(
            each.nbytes
            for each in model_file.load(tmp_path / name, CPU, keeps_packed=True).values()
        )
        for name in ("plain", "ours")
    ]
    assert [converted.rounding.bytes_before, converted.rounding.bytes_after] == sizes
    before, after = (model_file.load(tmp_path / name, CPU) for name in ("plain", "ours"))
    if kind != "int4":
        changes = [(after[name] - before[name]).double().square().sum() for name in before]
        whole = [
            before[name].double().square().sum()
            for name in before
            if name.endswith(("qkv", "o", "gate_up", "down"))
        ]
        assert converted.rounding.relative_error == pytest.approx(
            float(sum(changes) / sum(whole)) ** 0.5
        )
    assert 0 < converted.rounding.relative_error < most
    assert str(converted.rounding) == converted.cost
    assert converted.cost.startswith(f"rounded to {kind}: ")


@pytest.mark.long
def test_fewer_bits_take_answers_further_away(tmp_path: Path) -> None:
    """From those of the weights before."""
    random_checkpoint("llama2", tmp_path / "hf")
    plain = torch.tensor(log_probs(convert(tmp_path / "hf", tmp_path / "plain")))
    gaps = {}
    for kind in KINDS:
        rounded(tmp_path / "hf", tmp_path / kind, kind)
        gaps[kind] = (
            (torch.tensor(log_probs(tmp_path / kind, activation_dtype="model")) - plain)
            .abs()
            .mean()
            .item()
        )
    assert 0 < gaps["int8"] < gaps["fp8"] < gaps["int4"]


def test_a_layer_whose_inputs_make_no_groups_stays_as_it_is() -> None:
    assert round_int4(torch.randn(16, 48)) is None
    assert round_int8(torch.randn(16, 48)) is None


@pytest.mark.long
def test_kinds_have_numerics_ids_of_their_own(tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    ids = set()
    for kind in ("auto", *KINDS):
        # Folders of one name.
        (tmp_path / kind).mkdir()
        rounded(tmp_path / "hf", tmp_path / kind / "ours", kind)
        options = ExecutorOptions(
            model_folder=tmp_path / kind / "ours", num_threads=1, num_blocks=600
        )
        executor, _, facts = build_executor(options, lambda phase, done, total: None)
        executor.close()
        ids.add(facts.numerics_id)
    assert len(ids) == 4


def packed(tmp_path: Path, form: str) -> Path:
    random_checkpoint("llama2", tmp_path / "hf")
    write_packed(
        tmp_path / "hf",
        tmp_path / "packed",
        tmp_path / "expanded",
        (FORMS | BYTE_FORMS)[form],
        torch.float32,
    )
    return tmp_path / "packed"


@pytest.mark.parametrize(
    ("form", "method"),
    [
        ("gptq", "gptq"),
        ("awq", "awq"),
        ("fp8, blocks", "fp8"),
        ("int-quantized W8A8", "compressed-tensors"),
    ],
)
def test_a_methods_name_asserts_the_checkpoints(form: str, method: str, tmp_path: Path) -> None:
    source = packed(tmp_path, form)
    assert rounded(source, tmp_path / "asserted", method).quantization == method
    assert rounded(source, tmp_path / "ours", "auto").quantization == method
    for other in {"gptq", "awq", "int4", "fp8", "gguf"} - {method}:
        reported = (
            f"quantization is '{other}'; allowed: auto or {method}, as the weights of the "
            "checkpoint are packed"
        )
        with pytest.raises(ConfigError, match=reported):
            rounded(source, tmp_path / f"as {other}", other)
    options = ExecutorOptions(model_folder=tmp_path / "ours", quantization=method)
    assert checked(options, cpu.name, cpu.capabilities).model.quantization is not None
    reported = (
        f"quantization is 'int8'; allowed: auto or {method}, as the weights of the model folder"
    )
    with pytest.raises(ConfigError, match=reported):
        checked(
            ExecutorOptions(model_folder=tmp_path / "ours", quantization="int8"),
            cpu.name,
            cpu.capabilities,
        )


def test_a_method_of_weights_that_are_not_packed_is_refused_and_a_kind_by_an_engine_too(
    tmp_path: Path,
) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    with pytest.raises(
        ConfigError,
        match="quantization is 'awq'; allowed: auto: the weights of the checkpoint are not",
    ):
        rounded(tmp_path / "hf", tmp_path / "ours", "awq")
    folder = convert(tmp_path / "hf", tmp_path / "plain")
    for chosen, reported in (
        ("int4", "auto: the weights of the model folder are not packed"),
        ("int3", "auto, fp8, int8"),
    ):
        with pytest.raises(ConfigError, match=f"quantization is '{chosen}'; allowed: {reported}"):
            checked(
                ExecutorOptions(model_folder=folder, quantization=chosen),
                cpu.name,
                cpu.capabilities,
            )


def test_a_rounded_model_is_no_checkpoint_of_another_kind(tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    rounded(tmp_path / "hf", tmp_path / "ours", "int4")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "headwater", "kind": "int4"}
    options = ExecutorOptions(model_folder=tmp_path / "ours", quantization="int4")
    assert checked(options, cpu.name, cpu.capabilities).activations == "int8"
    with pytest.raises(ConfigError, match="quantization is 'int8'; allowed: auto or int4"):
        checked(
            ExecutorOptions(model_folder=tmp_path / "ours", quantization="int8"),
            cpu.name,
            cpu.capabilities,
        )


@pytest.mark.parametrize("fault", ["scales", "zeros", "int4"])
def test_a_fault_in_a_rounded_weight_shows_in_the_answers(fault: str, tmp_path: Path) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    rounded(tmp_path / "hf", tmp_path / "ours", "int4")
    sound = log_probs(tmp_path / "ours")
    path = tmp_path / "ours" / model_file.WEIGHTS_NAME
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensor = tensors[f"layers.1.down.{fault}"]
    if fault == "scales":
        tensor[1, 3] *= 1.1
    else:
        tensor[1, 3] ^= 1
    save_file(tensors, path)
    assert log_probs(tmp_path / "ours") != sound


def test_errors_list_the_choices_in_one_way() -> None:
    assert tuple(ROUNDINGS) == tuple(KINDS) == ROUNDED_KINDS
    assert set(KINDS) < set(QUANTIZATIONS)
