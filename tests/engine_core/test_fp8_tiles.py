"""Weights of e4m3 numbers that a CPU multiplies as they are, with activations in the model's
type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.layers.linear.fp8_tiles import Fp8TileLayout, Fp8TileLinear
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.layers.linear.linear import ExpandableLinear
from headwater.engine_core.layers.linear.packed import pack_linears
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.platforms.cpu_kernels import packed_kernels
from headwater.engine_core.weights import model_file
from headwater.kernels.cpu.fp8_linear import fp8_linear
from headwater.kernels.quant.byte_weights import Fp8Weight
from headwater.kernels.quant.fp8_linear import expanded_linear
from tests.engine_core.byte_checkpoint import BYTE_FORMS
from tests.engine_core.packed_checkpoint import write_packed
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.kernels.random_fp8 import random_fp8
from tests.long_values import long_but

FORMS = [name for name in BYTE_FORMS if name.startswith(("fp8", "fbgemm", "float"))]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IN_CI = ("fp8, blocks", "fp8, one scale")
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9]]


def write(tmp_path: Path, form: str, dtype: str) -> Path:
    """The converted folder."""
    random_checkpoint("llama2", tmp_path / "hf")
    write_packed(
        tmp_path / "hf", tmp_path / "packed", tmp_path / "expanded", BYTE_FORMS[form], DTYPES[dtype]
    )
    return convert(tmp_path / "packed", tmp_path / "ours", dtype)


def stored(folder: Path, dtype: torch.dtype) -> Any:
    config = registry.read_config(folder)
    tensors = model_file.load(folder, torch.device("cpu"), keeps_packed=True)
    return load_weights(model_class(config).layout(config), tensors, dtype)


def tiles_of(weights: Any, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    return dict(pack_linears(weights, folder, lambda done, total: None, **options).linears)


def log_probs(folder: Path, **options: Any) -> list[float]:
    """Log probabilities of a prompt's tokens."""
    engine = SmallEngine(folder, **options)
    answer = engine.answer([list(range(3, 203))], greedy(1, num_prompt_logprobs=0))[0]
    engine.close()
    return [entry.logprob for entry in answer.prompt_logprobs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", long_but(FORMS, *IN_CI))
def test_layers_stay_packed_and_multiply_by_the_weights_of_the_file_expanded_to_the_bit(
    form: str, dtype: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, form, dtype)
    weights = stored(folder, DTYPES[dtype])
    ours = tiles_of(weights, folder)
    assert {linear.kind for name, linear in ours.items() if name != "lm_head"} == {
        Fp8TileLinear.kind
    }
    for name in ("layers.1.down", "layers.2.o", "layers.0.gate_up", "layers.0.qkv"):
        linear = weights.linears[name]
        x = torch.randn(9, ours[name].in_features).to(DTYPES[dtype])
        assert isinstance(linear, ExpandableLinear)
        expected = expanded_linear(x, linear.expanded())
        assert torch.equal(fp8_linear(x, ours[name].tiles), expected)
        assert torch.equal(ours[name].product(x), expected)
    assert list(folder.glob("packed-*.bin"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_those_of_the_weights_expanded_but_for_the_order_of_sums(
    dtype: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, "fp8, blocks", dtype)
    ours = log_probs(folder)
    expanded = log_probs(folder, activation_dtype="model")
    if dtype == "float32":
        # Sums in bfloat16 round alike on some CPUs.
        assert ours != expanded
    most = 1e-4 if dtype == "float32" else 0.1
    assert np.abs(np.subtract(ours, expanded)).mean() < most * np.std(expanded)


@pytest.mark.parametrize("dtype", long_but(DTYPES, "bfloat16"))
def test_an_answer_has_the_same_bits_alone_and_beside_others(dtype: str, tmp_path: Path) -> None:
    engine = SmallEngine(write(tmp_path, "fp8, one scale", dtype))
    asked = greedy(12, num_logprobs=5, num_prompt_logprobs=5)
    together = engine.answer(PROMPTS, asked)
    alone = [engine.answer([prompt], asked)[0] for prompt in PROMPTS]
    engine.close()
    for one, other in zip(together, alone, strict=True):
        assert (one.token_ids, one.logprobs, one.prompt_logprobs) == (
            other.token_ids,
            other.logprobs,
            other.prompt_logprobs,
        )


def test_activations_of_the_model_have_weights_expanded(tmp_path: Path) -> None:
    folder = write(tmp_path, "fp8, one scale", "float32")
    kinds = {
        each.kind
        for each in tiles_of(stored(folder, torch.float32), folder, expands_fp8=True).values()
    }
    assert Fp8TileLinear.kind not in kinds


def test_engines_with_weights_packed_and_expanded_have_other_ids(tmp_path: Path) -> None:
    folder = write(tmp_path, "fp8, one scale", "float32")
    ids = []
    for activations in ("auto", "model"):
        engine = SmallEngine(folder, activation_dtype=activations)
        ids.append(engine.numerics_id)
        engine.close()
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "group_size", "is_shared"),
    [(4096, 4096, 4096, False), (4096, 4096, 128, True), (1024, 4096, 4096, True)],
    ids=["a scale for each output", "blocks of 128", "one scale"],
)
def test_tiles_take_at_most_3_percent_more_bytes_than_the_numbers(
    num_rows: int, num_inputs: int, group_size: int, is_shared: bool
) -> None:
    layout = Fp8TileLayout.of(
        random_fp8(num_rows, num_inputs, group_size, is_shared=is_shared), torch.bfloat16
    )
    assert layout is not None
    assert layout.num_bytes < 1.03 * num_rows * num_inputs


def test_weights_that_no_kernel_reads_are_expanded() -> None:
    """Groups of no multiple of 32 inputs, a number that is none, and float16."""
    assert Fp8TileLayout.of(random_fp8(32, 96, 48, is_shared=False), torch.float32) is None
    weight = random_fp8(32, 96, 96, is_shared=False)
    assert Fp8TileLayout.of(weight, torch.float16) is None
    values = weight.values.view(torch.uint8).clone()
    values[3, 5] = 0xFF
    broken = Fp8Weight(values=values.view(torch.float8_e4m3fn), scales=weight.scales)
    assert Fp8TileLayout.of(broken, torch.float32) is None


def test_a_converted_folder_has_its_kernels_compiled(tmp_path: Path) -> None:
    """Before an engine waits for them."""
    weights = stored(write(tmp_path, "fp8, blocks", "float32"), torch.float32)
    packed = pack_linears(weights, None, lambda done, total: None)
    formats = {
        linear.tiles.format
        for linear in packed.linears.values()
        if isinstance(linear, Fp8TileLinear)
    }
    assert len(packed_kernels(packed)) == len(formats) > 0
