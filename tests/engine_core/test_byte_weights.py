"""Checkpoints of eight bits and of compressed-tensors: the same bits as those of the file expanded,
and what is refused, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.dummy import dummy
from tests.engine_core.byte_checkpoint import BYTE_FORMS, FP8, FP8_TOKENS, Form, compressed, scheme
from tests.engine_core.packed_checkpoint import write_packed
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.long_values import long_but

PROMPTS = [[5, 6, 7], list(range(3, 60)), [9]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MLP = "model.layers.1.mlp"
ATTENTION = "model.layers.1.self_attn"
DOWN = f"{MLP}.down_proj"
KINDS_OF_FORMS = {
    "mixed": {"int4", "int8", "dense"},
    "W8A8": {"w8a8"},
    "4 bits": {"int4"},
    "larger": {"f8a8"},
    "blocks": {"fp8"},
    "fp8": {"f8a8"},
    "float": {"f8a8"},
}
A_FORM_OF_EACH_KIND = (
    "fp8, blocks",
    "fp8, one scale",
    "gptq of 8 bits, not symmetric, in act order",
    "pack-quantized, 4 bits",
    "pack-quantized, mixed by layer",
    "int-quantized W8A8",
)
"""Kinds of the layers of forms whose names have these words; of the others `int8`."""


def write(
    tmp_path: Path, form: str, dtype: str = "float32", family: str = "llama3 with scaled rope"
) -> Path:
    """Folder with both checkpoints."""
    random_checkpoint(family, tmp_path / "hf")
    write_packed(
        tmp_path / "hf", tmp_path / "packed", tmp_path / "expanded", BYTE_FORMS[form], DTYPES[dtype]
    )
    return tmp_path


def loaded(folder: Path, dtype: torch.dtype, *, keeps_packed: bool = True) -> Weights:
    config = registry.read_config(folder)
    tensors = model_file.load(folder, torch.device("cpu"), keeps_packed=keeps_packed)
    return load_weights(model_class(config).layout(config), tensors, dtype)


def answers(folder: Path, **options: Any) -> list[tuple[list[int], list[Any]]]:
    """Tokens, and log probabilities of prompts and tokens."""
    engine = SmallEngine(folder, activation_dtype="model", **options)
    found = engine.answer(PROMPTS, greedy(12, num_logprobs=5, num_prompt_logprobs=5))
    engine.close()
    return [(each.token_ids, each.logprobs + each.prompt_logprobs) for each in found]


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Other tensors in a checkpoint's file, by names whose dots are `__`; None: none of this
    name."""
    kept = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        kept.pop(name.replace("__", "."), None)
        if tensor is not None:
            kept[name.replace("__", ".")] = tensor.contiguous()
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize("form", long_but(BYTE_FORMS, *A_FORM_OF_EACH_KIND))
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
    assert set(kinds.values()) == next(
        (each for word, each in KINDS_OF_FORMS.items() if word in form), {"int8"}
    )
    assert answers(packed) == answers(expanded)


@pytest.mark.parametrize("form", BYTE_FORMS)
def test_a_platform_without_such_products_gets_the_weights_expanded(
    form: str, tmp_path: Path
) -> None:
    write(tmp_path, form)
    packed, expanded = (
        convert(tmp_path / name, tmp_path / f"our {name}") for name in ("packed", "expanded")
    )
    ours, dense = (
        loaded(folder, torch.float32, keeps_packed=False).linears for folder in (packed, expanded)
    )
    assert {linear.kind for linear in ours.values()} <= {"dense", "int4"}
    x = torch.randn(3, 64)
    assert torch.equal(ours["layers.1.qkv"].product(x), dense["layers.1.qkv"].product(x))


@pytest.mark.parametrize("form", ["fp8, blocks", "fp8, blocks larger than a matrix"])
def test_a_matrix_of_blocks_is_what_transformers_makes_of_it(form: str, tmp_path: Path) -> None:
    """transformers loads such a model only beside another library; its arithmetic needs none."""
    write(tmp_path, form)
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    ours = loaded(
        convert(tmp_path / "packed", tmp_path / "ours"), torch.float32, keeps_packed=False
    )
    down = ours.linears["layers.1.down"]
    assert isinstance(down, DenseLinear)
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: PLC0415 (two seconds of every worker)

    theirs = Fp8Dequantize(None)._dequantize_one(
        stored[f"{DOWN}.weight"], stored[f"{DOWN}.weight_scale_inv"]
    )
    assert torch.equal(down.weight, theirs)


@pytest.mark.long
@pytest.mark.parametrize("family", long_but(("qwen2", "qwen3", "smollm2", "gemma3"), "gemma3"))
def test_families_with_biases_norms_and_tied_heads_are_served(family: str, tmp_path: Path) -> None:
    write(tmp_path, "fp8, blocks", family=family)
    packed, expanded = (
        convert(tmp_path / name, tmp_path / f"our {name}") for name in ("packed", "expanded")
    )
    assert answers(packed) == answers(expanded)


@pytest.mark.parametrize("form", ["gptq of 8 bits", "int-quantized W8A8", "fp8, one scale"])
def test_a_converted_folder_is_as_small_as_the_file(form: str, tmp_path: Path) -> None:
    write(tmp_path, form)
    folder = convert(tmp_path / "packed", tmp_path / "ours")
    sizes = [
        path.stat().st_size
        for path in (folder / "weights.safetensors", tmp_path / "packed/model.safetensors")
    ]
    assert sizes[0] < 1.03 * sizes[1]


def test_a_packed_head_is_expanded(tmp_path: Path) -> None:
    write(tmp_path, "fp8, one scale")
    values = torch.randn(512, 64).to(FP8)
    scale = torch.tensor(0.1)
    change(tmp_path / "packed", lm_head__weight=values, lm_head__weight_scale=scale)
    change(tmp_path / "expanded", lm_head__weight=values.float() * scale)
    packed, expanded = (
        convert(tmp_path / name, tmp_path / f"our {name}") for name in ("packed", "expanded")
    )
    assert answers(packed) == answers(expanded)


@pytest.mark.parametrize("target", ["Linear", "re:.*_proj$"])
def test_scales_of_a_key_value_cache_are_left_out(target: str, tmp_path: Path) -> None:
    write(tmp_path, "float-quantized, a scale a channel")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = [target]
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    plain = answers(convert(tmp_path / "packed", tmp_path / "plain"))
    names = [
        f"model.layers.{i}.self_attn.{name}" for i in range(3) for name in ("k_scale", "v_scale")
    ]
    names += [f"{ATTENTION}.k_proj.output_scale", f"{ATTENTION}.v_proj.output_scale"]
    change(tmp_path / "packed", **{name.replace(".", "__"): torch.tensor([0.5]) for name in names})
    assert answers(convert(tmp_path / "packed", tmp_path / "scaled")) == plain


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_what_tools_of_2024_wrote_beside_packed_weights_changes_nothing(
    key: str, tmp_path: Path
) -> None:
    """llm-compressor called such files frozen, and wrote that nothing is sparse."""
    write(tmp_path, "pack-quantized, 4 bits")
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    convert(tmp_path / "packed", tmp_path / "ours")
    own = config.pop("quantization_config") | {"quantization_status": "frozen"}
    sparsity = {
        "format": "dense",
        "global_sparsity": 0.14,
        "ignore": [],
        "sparsity_structure": "unstructured",
    }
    path.write_text(json.dumps(config | {key: own | {"sparsity_config": sparsity}}))
    convert(tmp_path / "packed", tmp_path / "old")
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("ours", "old")]
    assert weights[0] == weights[1]
    assert registry.read_config(tmp_path / "old") == registry.read_config(tmp_path / "ours")


@pytest.mark.parametrize("fault", long_but(("scale", "value", "order"), "scale"))
@pytest.mark.parametrize("form", ["fp8, blocks", "int-quantized W8A8"])
def test_a_fault_in_a_single_place_shows_in_the_answers(
    form: str, fault: str, tmp_path: Path
) -> None:
    """What the comparison of whole models would miss if it were too kind."""
    write(tmp_path, form)
    sound = answers(convert(tmp_path / "packed", tmp_path / "sound"))
    scale = f"{MLP}.down_proj.weight_scale{'_inv' if 'fp8' in form else ''}"
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    name = scale if fault == "scale" else f"{MLP}.down_proj.weight"
    tensor = tensors[name].clone()
    if fault == "scale":
        tensor[1] *= 1.05
    elif fault == "value":
        tensor.view(torch.uint8)[5, 7] ^= 0x40
    else:
        tensor.view(torch.uint8)[:] = tensor.view(torch.uint8).roll(1, 1)
    change(tmp_path / "packed", **{name.replace(".", "__"): tensor})
    assert answers(convert(tmp_path / "packed", tmp_path / "faulty")) != sound


def test_a_zero_point_that_is_one_off_shows_in_the_answers(tmp_path: Path) -> None:
    write(tmp_path, "int-quantized, weights alone")
    sound = answers(convert(tmp_path / "packed", tmp_path / "sound"))
    name = f"{MLP}.down_proj.weight_zero_point"
    tensor = load_file(tmp_path / "packed" / "model.safetensors")[name].clone()
    tensor[9, 1] ^= 1
    change(tmp_path / "packed", **{name.replace(".", "__"): tensor})
    assert answers(convert(tmp_path / "packed", tmp_path / "faulty")) != sound


FP8_CHANNEL = scheme(8, "channel", type="float", activations=FP8_TOKENS)
W4 = scheme(4, "group", group_size=32)


def nested(group: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """The group with other facts of its weights."""
    return group | {"weights": group["weights"] | weights}


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"quantization_config.fmt is 'e5m2'; allowed: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]; allowed: two positive"),
        ({"quant_method": "fp8", "activation_scheme": "own"}, r"activation_scheme is 'own'; allowed: dynamic or"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"quant_method is 'modelopt'; allowed: gptq, awq"),
        (compressed("nvfp4-pack-quantized", W4), r"format is 'nvfp4-pack-quantized'; allowed: pack-quantized or"),
        (compressed("mxfp4-pack-quantized", W4), r"format is 'mxfp4-pack-quantized'; allowed: pack-quantized or"),
        (compressed("marlin-24", W4), r"format is 'marlin-24'; allowed: pack-quantized or"),
        (compressed("pack-quantized"), r"config_groups is \{\}; allowed: groups of layers"),
        (compressed("pack-quantized", nested(W4, num_bits=3)), r"group_0.weights.num_bits is 3; allowed: 4 or 8"),
        (compressed("pack-quantized", nested(W4, num_bits=2)), r"group_0.weights.num_bits is 2; allowed: 4 or 8"),
        (compressed("pack-quantized", nested(W4, group_size=48)), r"group_0.weights.group_size is 48; allowed: 32"),
        (compressed("pack-quantized", nested(W4, strategy="block")), r"weights.strategy is 'block'; allowed: tensor"),
        (compressed("pack-quantized", W4, {"weights": None}), r"group_1.targets is None; allowed: names"),
        (compressed("pack-quantized", W4 | {"weights": None}), r"group_0.weights is None; allowed: how weights"),
        (compressed("mixed-precision", W4), r"group_0.format is None; allowed: pack-quantized or"),
        (compressed("float-quantized", nested(FP8_CHANNEL, num_bits=4)), r"weights.num_bits is 4; allowed: 8"),
        (compressed("pack-quantized", FP8_CHANNEL), r"group_0.format is 'pack-quantized'; allowed: float-quantized"),
        (compressed("pack-quantized", W4, sparsity_config={"format": "sparse-bitmask"}), r"sparsity_config is"),
        (compressed("pack-quantized", W4, transform_config={"config_groups": {}}), r"transform_config is"),
        (compressed("pack-quantized", W4, quantization_status="calibration"), r"quantization_status is 'cal"),
        (
            compressed("int-quantized", W4 | {"input_activations": {"num_bits": 4, "type": "int"}}),
            r"group_0.input_activations.num_bits is 4; allowed: 8",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_field_before_any_tensor_is_read(
    config: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    random_checkpoint("llama2", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    # Nothing that could be read as a tensor.
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=reported):
        convert(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize(
    ("form", "name", "tensor", "reported"),
    [
        ("fp8, one scale", "weight_scale", None, "without model.layers.1.mlp.down_proj.weight_scale"),
        ("fp8, one scale", "weight", None, "without model.layers.1.mlp.down_proj.weight'"),
        ("fp8, one scale", "weight_scale", torch.ones(3), r"down_proj.weight_scale is \(3,\); allowed: \(64, 1\)"),
        ("fp8, one scale", "weight_scale", torch.tensor(torch.nan), r"weight_scale is 'infinite or no number'"),
        ("fp8, one scale", "weight", torch.ones(64, 128).to(torch.float8_e5m2), r"down_proj.weight is 'torch.float8"),
        ("fp8, blocks", "weight_scale_inv", torch.ones(4, 5), r"weight_scale_inv is \(4, 5\); allowed: \(4, 4\)"),
        ("fp8, blocks", "weight", torch.ones(64, 96).to(FP8), r"weight_scale_inv is \(4, 4\); allowed: \(4, 3\)"),
        ("int-quantized W8A8", "weight_scale", torch.ones(63, 1), r"weight_scale is \(63, 1\); allowed: \(64, 1\)"),
        ("int-quantized W8A8", "weight_scale", torch.ones(1, 1), r"weight_scale is \(1, 1\); allowed: \(64, 1\)"),
        ("float-quantized, a scale a channel", "weight_scale", torch.ones(1), r"weight_scale is \(1,\); allowed: \(64"),
        ("fbgemm_fp8", "weight_scale", torch.tensor(0.5), r"weight_scale is \(\); allowed: \(64, 1\)"),
        (
            "pack-quantized, 8 bits, a channel a group",
            "weight_scale",
            torch.ones(1, 1),
            r"weight_scale is \(1, 1\); allowed: \(64, 1\)",
        ),
        ("int-quantized W8A8", "weight", torch.ones(64, 100).char(), r"number of inputs of .*down_proj is 100"),
        ("int-quantized, weights alone", "weight_zero_point", None, "without "
                                                                    ".*down_proj.weight_zero_point"),
        ("pack-quantized, 4 bits", "weight_packed", torch.ones(64, 15).int(), r"packed is \(64, 15\); allowed: \(64"),
        ("pack-quantized, 4 bits", "weight_shape", torch.tensor([64, 0]), r"weight_shape is \(64, 0\); allowed: out"),
        ("gptq of 8 bits", "qzeros", torch.ones(4, 15).int(), r"down_proj.qzeros is \(4, 15\); allowed: \(4, 16\)"),
        ("gptq of 8 bits", "scales", torch.full((4, 64), torch.inf).half(), r"down_proj.scales is 'infinite"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    form: str, name: str, tensor: torch.Tensor | None, reported: str, tmp_path: Path
) -> None:
    write(tmp_path, form)
    change(tmp_path / "packed", **{f"{DOWN}.{name}".replace(".", "__"): tensor})
    with pytest.raises(ConfigError, match=reported):
        convert(tmp_path / "packed", tmp_path / "ours")


@pytest.mark.parametrize(
    ("name", "changed", "reported"),
    [
        ("layers.1.down.fp8", lambda tensor: tensor[:-1], r"layers.1.down.fp8 is \(63, 128\); allowed: \(64, 128\)"),
        ("layers.1.down.scales", lambda tensor: tensor.half(), r"dtype of tensor layers.1.down.scales is .*float16"),
        ("layers.1.down.scales", lambda tensor: tensor.repeat(5, 1), r"groups of fp8 weights of layers.1.down is '20"),
        ("layers.1.down.scales", lambda tensor: None, r"without layers.1.down"),
    ],
)  # fmt: skip
def test_a_stored_weight_that_does_not_fit_is_refused_by_its_name(
    name: str, changed: Any, reported: str, tmp_path: Path
) -> None:
    write(tmp_path, "fp8, blocks")
    folder = convert(tmp_path / "packed", tmp_path / "ours")
    tensors = load_file(folder / model_file.WEIGHTS_NAME)
    tensors |= {name: changed(tensors.pop(name))}
    kept = {key: tensor.contiguous() for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / model_file.WEIGHTS_NAME)
    for keeps_packed in (True, False):
        with pytest.raises(ConfigError, match=reported if keeps_packed else "layers.1.down"):
            loaded(folder, torch.float32, keeps_packed=keeps_packed)


@pytest.mark.parametrize(
    "form", ["fp8, blocks larger than a matrix", "int-quantized W8A8", "gptq of 8 bits"]
)
def test_random_weights_of_a_packed_model_are_packed_too(form: str, tmp_path: Path) -> None:
    path = random_path(
        tmp_path, BYTE_FORMS[form] if "larger" not in form else BYTE_FORMS["fp8, blocks"]
    )
    config = registry.read_config(path)
    layout = model_class(config).layout(config)
    tensors = dummy(layout, torch.float32, torch.device("cpu"), quantization=config.quantization)
    kinds = {
        name: linear.kind
        for name, linear in load_weights(layout, tensors, torch.float32).linears.items()
    }
    assert kinds.pop("lm_head") == "dense"
    assert len(set(kinds.values())) == 1
    assert set(kinds.values()) < {"fp8", "f8a8", "w8a8", "int8"}


def random_path(tmp_path: Path, form: Form) -> Path:
    random_checkpoint("llama2", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": form.config}))
    return tmp_path / "hf"


@pytest.mark.long
def test_formats_have_numerics_ids_of_their_own(tmp_path: Path) -> None:
    from headwater.engine_core.executors.build.single import build_executor  # noqa: PLC0415 (as an engine builds it)

    ids = set()
    for form in ("fp8, blocks", "int-quantized W8A8", "int-quantized, weights alone"):
        (tmp_path / form).mkdir()
        write(tmp_path / form, form)
        folder = convert(tmp_path / form / "packed", tmp_path / form / "ours")
        options = ExecutorOptions(
            model_folder=folder, num_threads=1, num_blocks=600, load_format="dummy"
        )
        executor, _, facts = build_executor(options, lambda phase, done, total: None)
        executor.close()
        ids.add(facts.numerics_id)
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("form", "activation_dtype", "reported"),
    [
        ("int-quantized W8A8", "model", "activations in int8; they stay in float32"),
        pytest.param("int-quantized W8A8", "auto", "", marks=pytest.mark.long),
        ("fp8, blocks", "auto", "activations in fp8; they stay in float32"),
        pytest.param("gptq of 8 bits", "model", "", marks=pytest.mark.long),
    ],
)
def test_an_engine_says_that_activations_are_not_rounded_as_the_checkpoint_asks(
    form: str,
    activation_dtype: str,
    reported: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(tmp_path, form)
    SmallEngine(
        convert(tmp_path / "packed", tmp_path / "ours"), activation_dtype=activation_dtype
    ).close()
    assert len(caplog.records) == (1 if reported else 0)
    assert reported in "".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("form", "left"),
    [
        ("fp8, blocks", {"fp8"}),
        ("fp8, blocks larger than a matrix", set()),
        ("fp8, one scale", set()),
        ("int-quantized W8A8", set()),
    ],
)
def test_activations_that_no_platform_rounds_have_their_own_numerics_id(
    form: str, left: set[str], tmp_path: Path
) -> None:
    quantization = registry.read_config(random_path(tmp_path, BYTE_FORMS[form])).quantization
    assert quantization is not None
    assert quantization.rounded_activations
    assert quantization.unrounded_activations == left
