"""Weights of eight bits on a GPU: the bits of the model expanded, whatever else is in the batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from headwater.engine_core.devices import cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.weights import load_weights
from headwater.engine_core.layers.linear.ordered import order_linears
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms import cuda_products
from tests.engine_core.byte_checkpoint import BYTE_FORMS
from tests.engine_core.fp8_block_models import written_blocks
from tests.engine_core.packed_checkpoint import write_packed
from tests.engine_core.small_models import SHAPE, convert, random_checkpoint
from tests.engine_core.test_cuda_engine import NEWER
from tests.engine_core.test_int4_on_gpu import answers

pytestmark = pytest.mark.gpu

ORDERED = [
    form
    for form in BYTE_FORMS
    if not any(word in form for word in ("4 bits", "act order", "mixed", "cut off"))
]
"""Forms whose layers are whole in tiles of the kernel for Hopper."""
ROUNDED = [
    "int-quantized W8A8",
    "int-quantized W8A8, activations static",
    "float-quantized, a scale a channel",
    "float-quantized, one scale, activations static",
    "fp8, one scale",
    "fp8, blocks larger than a matrix",
    "fbgemm_fp8",
]
"""Forms made for tokens of eight bits, with one scale for each output, or for blocks of 128
inputs."""


def written(form: str, tmp_path: Path) -> tuple[Path, Path]:
    """Converted folders of the packed checkpoint and of the expanded one."""
    random_checkpoint("qwen3", tmp_path / "hf")
    write_packed(
        tmp_path / "hf",
        tmp_path / "packed",
        tmp_path / "expanded",
        BYTE_FORMS[form],
        torch.bfloat16,
    )
    packed, expanded = (
        convert(tmp_path / each, tmp_path / f"our {each}", "bfloat16")
        for each in ("packed", "expanded")
    )
    return packed, expanded


def kinds_of(folder: Path, activation_dtype: str = "auto") -> set[str]:
    """Kinds of the layers' weights as an engine on a GPU has them. The head must be dense."""
    device = torch.device("cuda")
    request = checked(
        ExecutorOptions(model_folder=folder, device="cuda", activation_dtype=activation_dtype),
        "cuda",
        cuda.capabilities,
    )
    weights = load_weights(request, device, lambda *_: None, cuda.stored_forms(request))
    ordered = order_linears(weights, rounds_tokens=request.rounds_tokens)
    kinds = {name: linear.kind for name, linear in ordered.linears.items()}
    assert kinds.pop("lm_head") == "dense"
    return set(kinds.values())


@pytest.mark.parametrize("form", BYTE_FORMS)
def test_a_packed_checkpoint_answers_as_the_same_file_expanded_to_the_bit(
    form: str, tmp_path: Path
) -> None:
    packed, expanded = written(form, tmp_path)
    torch.manual_seed(1)
    asked = [
        torch.randint(3, SHAPE["vocab_size"], (count,)).tolist() for count in (1, 7, 40, 300, 500)
    ]
    exact = partial(answers, packed, activation_dtype="model")
    together = exact(asked)
    assert together == answers(expanded, asked)
    assert together == exact(asked, max_num_batched_tokens=64)
    assert together[:2] == [exact([prompt])[0] for prompt in asked[:2]]


@pytest.mark.parametrize("form", [*ROUNDED, "wide"])
def test_tokens_of_eight_bits_have_one_arithmetic_in_any_batch(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = written_blocks(tmp_path) if form == "wide" else written(form, tmp_path)
    torch.manual_seed(1)
    asked = [
        torch.randint(3, SHAPE["vocab_size"], (count,)).tolist() for count in (1, 7, 40, 300, 500)
    ]
    together = answers(packed, asked)
    assert together == answers(packed, asked, max_num_batched_tokens=64)
    assert together[:2] == [answers(packed, [prompt])[0] for prompt in asked[:2]]
    assert together != answers(packed, asked, activation_dtype="model")
    if "int" in form:
        # Sums of integers are exact in whatever way they are made.
        monkeypatch.setattr(
            cuda_products, "rounded_product", lambda linear, early_rows: linear.product
        )
        assert together == answers(packed, asked)


@pytest.mark.parametrize("form", ORDERED)
def test_layers_stay_packed_and_the_head_is_dense(form: str, tmp_path: Path) -> None:
    packed, _ = written(form, tmp_path)
    assert kinds_of(packed, "model") == {"ordered"}
    assert kinds_of(packed) == {"rounded" if form in ROUNDED else "ordered"}


def test_weights_in_blocks_are_multiplied_with_tokens_rounded_by_blocks(tmp_path: Path) -> None:
    packed, expanded = written_blocks(tmp_path)
    assert kinds_of(packed) == {"rounded"}
    assert kinds_of(packed, "model") == {"ordered"}
    torch.manual_seed(1)
    asked = [torch.randint(3, SHAPE["vocab_size"], (count,)).tolist() for count in (1, 40, 300)]
    assert answers(packed, asked, activation_dtype="model") == answers(expanded, asked)


EXPERTS = {"moe_intermediate_size": 256}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3-moe", EXPERTS),
        ("glm4-moe", EXPERTS),
        ("mimo-v2-flash", EXPERTS | {"head_dim": 192, "v_head_dim": 128}),
    ],
)
def test_experts_and_tokens_of_eight_bits_have_one_arithmetic_in_any_batch(
    family: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Shared experts and heads of two sizes too."""
    if family in NEWER and not hasattr(transformers, NEWER[family]):
        pytest.skip(f"this release of transformers has no {family}")
    packed, expanded = written_blocks(tmp_path, family, **sizes)
    torch.manual_seed(1)
    asked = [
        torch.randint(3, SHAPE["vocab_size"], (count,)).tolist() for count in (1, 7, 40, 300, 500)
    ]
    together = answers(packed, asked)
    assert together == answers(packed, asked, max_num_batched_tokens=64)
    assert together[:2] == [answers(packed, [prompt])[0] for prompt in asked[:2]]
    unrounded = answers(packed, asked, activation_dtype="model")
    assert together != unrounded == answers(expanded, asked)
