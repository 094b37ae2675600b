"""Weights of four and eight bits in groups that a CPU multiplies as they are: activations in 8
bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.layers.linear.group_tiles import TileLayout, TileLinear
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.layers.linear.packed import pack_linears
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.models.packed_folder import pack_folder
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms.cpu_kernels import packed_kernels
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.formats import gptq
from headwater.engine_core.weights.formats.packing import Packing
from headwater.kernels.quant.block_activations import quantize_tokens, read
from tests.engine_core.byte_checkpoint import (
    BYTE_FORMS,
    IntMatrix,
    compressed,
    gptq_tensors,
    int_quantized_tensors,
    pack_quantized_tensors,
    scheme,
)
from tests.engine_core.packed_checkpoint import FORMS, Form, write_packed
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.long_values import long_but

ALL_FORMS = FORMS | BYTE_FORMS
PACKED = [name for name in ALL_FORMS if not name.startswith(("fp8", "fbgemm", "float"))]
W8A8 = "int-quantized W8A8"


def write(tmp_path: Path, form: Form, dtype: str = "float32") -> Path:
    """The converted folder; beside it `our expanded`, of the same weights expanded."""
    random_checkpoint("llama2", tmp_path / "hf")
    write_packed(
        tmp_path / "hf", tmp_path / "packed", tmp_path / "expanded", form, getattr(torch, dtype)
    )
    convert(tmp_path / "expanded", tmp_path / "our expanded", dtype)
    return convert(tmp_path / "packed", tmp_path / "ours", dtype)


def served(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Layers as a CPU multiplies them."""
    config = registry.read_config(folder)
    tensors = model_file.load(folder, torch.device("cpu"), keeps_packed=True)
    weights = load_weights(model_class(config).layout(config), tensors, dtype)
    return dict(pack_linears(weights, folder, lambda done, total: None).linears)


def log_probs(folder: Path, **options: Any) -> list[float]:
    """Log probabilities of a prompt's tokens."""
    engine = SmallEngine(folder, **options)
    answer = engine.answer([list(range(3, 203))], greedy(1, num_prompt_logprobs=0))[0]
    engine.close()
    return [entry.logprob for entry in answer.prompt_logprobs]


@pytest.mark.parametrize("name", PACKED)
def test_layers_stay_packed_and_their_products_are_close_to_those_of_the_weights_expanded(
    name: str, tmp_path: Path
) -> None:
    ours = served(write(tmp_path, ALL_FORMS[name]))
    dense = served(tmp_path / "our expanded")
    kinds = {layer: linear.kind for layer, linear in ours.items()}
    assert kinds.pop("lm_head") == "packed"
    mixed = {f"layers.{i}.qkv" for i in range(3)} if "mixed" in name else set()
    assert {layer for layer, kind in kinds.items() if kind != TileLinear.kind} == mixed
    for layer in ("layers.1.down", "layers.2.o", "layers.0.gate_up"):
        x = torch.randn(40, ours[layer].in_features)
        exact = dense[layer].product(x)
        error = (ours[layer].product(x) - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.02


@pytest.mark.parametrize("dtype", long_but(("float32", "bfloat16"), "bfloat16"))
@pytest.mark.parametrize(
    "name", long_but(("gptq in act order", "gptq of 8 bits", W8A8), "gptq in act order")
)
def test_answers_are_close_to_those_of_the_weights_expanded_and_not_the_same(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Random weights make logits of tens, so the log probabilities of a prompt differ by a tenth or
    two."""
    folder = write(tmp_path, ALL_FORMS[name], dtype)
    short = log_probs(folder)
    exact = log_probs(folder, activation_dtype="model")
    assert 0.001 < np.abs(np.subtract(short, exact)).mean() / np.std(exact) < 0.2
    assert exact == log_probs(tmp_path / "our expanded")


def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, ALL_FORMS["gptq in act order"], "bfloat16")
    prompts = [[5 + i, 6, 7, *range(3, 3 + 5 * i)] for i in range(20)]

    def answers(some: list[list[int]], **options: Any) -> list[Any]:
        engine = SmallEngine(folder, **options)
        found = engine.answer(some, greedy(12, num_logprobs=5))
        engine.close()
        return [(each.token_ids, each.logprobs) for each in found]

    together = answers(prompts)
    assert together == answers(prompts, num_threads=2, max_num_batched_tokens=70)
    assert together[7:8] == answers(prompts[7:8])


def test_activations_of_w8a8_are_rounded_token_by_token_as_the_checkpoint_says(
    tmp_path: Path,
) -> None:
    """Against products in float64 of activations that are rounded so: what is left is float32's
    rounding."""
    ours = served(write(tmp_path, ALL_FORMS[W8A8]))
    dense = served(tmp_path / "our expanded")
    x = torch.randn(20, 128)
    (rounded,) = read(quantize_tokens(x))
    whole = (rounded.values.double() * rounded.scale[..., None].double()).flatten(1)
    exact = whole @ dense["layers.1.down"].product(torch.eye(128)).double()
    assert (ours["layers.1.down"].product(x) - exact).abs().max() < 1e-5 * exact.abs().max()
    assert torch.equal(rounded.scale, (x.abs().amax(1) / 127)[:, None].expand_as(rounded.scale))


@pytest.mark.parametrize(
    ("bits", "group_size", "bound"), [(4, 128, 1.03), (4, 32, 1.03), (8, 128, 1.03), (8, -1, 1.03)]
)
def test_what_is_packed_beside_the_weights_is_as_small_as_the_checkpoint(
    bits: int, group_size: int, bound: float
) -> None:

    matrix = IntMatrix.random(
        "layer", 512, 1024, np.random.default_rng(0), bits=bits, group_size=group_size
    )
    tensors = gptq_tensors(matrix, 1)
    packing = Packing(
        format="gptq", bits=bits, group_size=group_size, zero_offset=1, has_order=True
    )
    layout = TileLayout.of(gptq.unpack("layer", tensors, packing))
    assert layout is not None
    published = sum(tensor.nbytes for name, tensor in tensors.items() if name != "g_idx")
    assert published <= layout.num_bytes < bound * published


def test_groups_that_are_no_tiles_are_expanded(tmp_path: Path) -> None:
    """In this order one group has more inputs than the others."""
    form = Form(
        config=compressed("pack-quantized", scheme(4, "group", group_size=32, actorder="group")),
        write=pack_quantized_tensors,
        make=_uneven,
    )
    folder = write(tmp_path, form)
    assert {linear.kind for linear in served(folder).values()} == {"packed"}


def _uneven(layer: str, n: int, k: int, rng: np.random.Generator) -> IntMatrix:
    matrix = IntMatrix.random(layer, n, k, rng, bits=4, group_size=32, act_order=True)
    matrix.of_inputs[np.flatnonzero(matrix.of_inputs == 1)[0]] = 0
    return matrix


def test_only_a_cpu_with_packed_integers_takes_int8_activations(tmp_path: Path) -> None:
    folder = write(tmp_path, ALL_FORMS[W8A8])
    for load_format in ("auto", "dummy"):
        options = ExecutorOptions(model_folder=folder, load_format=load_format, dtype="float32")
        assert checked(options, "cpu", cpu.capabilities).activations == "int8"
        assert checked(options, "cuda", cuda.capabilities).activations == "float32"


def test_a_converted_folder_has_its_layers_packed_and_its_kernels_are_known(tmp_path: Path) -> None:
    folder = write(tmp_path, ALL_FORMS[W8A8])
    weights = pack_folder(folder, lambda done, total: None)
    assert len(list(folder.glob("packed-*"))) == 1
    # A product, and what rounds tokens.
    assert len(packed_kernels(weights)) == 2


@pytest.mark.parametrize("fault", ["scale", "zero", "order"])
def test_a_fault_in_a_single_group_shows_in_the_answers(fault: str, tmp_path: Path) -> None:
    def write_faulty(matrix: IntMatrix) -> dict[str, torch.Tensor]:
        tensors = int_quantized_tensors(matrix)
        if fault == "scale":
            tensors["weight_scale"] = tensors["weight_scale"].clone()
            tensors["weight_scale"][3, 1] *= 1.1
        elif fault == "zero":
            tensors["weight_zero_point"][3, 1] += 1
        else:
            tensors["weight"][:, [0, 33]] = tensors["weight"][:, [33, 0]]
        return tensors

    config = compressed("int-quantized", scheme(8, "group", group_size=32, symmetric=False))
    make = partial(IntMatrix.random, group_size=32, symmetric=False)
    found = []
    for name, writer in (("sound", int_quantized_tensors), ("faulty", write_faulty)):
        (tmp_path / name).mkdir()
        found.append(
            log_probs(write(tmp_path / name, Form(config=config, write=writer, make=make)))
        )
    assert found[0] != found[1]
