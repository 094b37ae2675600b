"""GGUF's block formats on a GPU: packed, embedding and head included, with the bits of the model
expanded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.engine_core.devices import cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.weights import load_weights
from headwater.engine_core.layers.linear.kinds import Weights
from headwater.engine_core.layers.linear.planes import PlanesTable
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.kernels.quant.block_formats import (
    FORMATS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    BlockFormat,
)
from tests.engine_core.block_models import write_blocks
from tests.engine_core.small_models import SHAPE
from tests.engine_core.test_block_weights import write
from tests.engine_core.test_int4_on_gpu import answers
from tests.long_values import long_but

pytestmark = pytest.mark.gpu

SETS = {format.name: (format,) for format in FORMATS.values()} | {
    "as Q4_K_M": (Q6_K, Q4_K, Q4_K, Q5_K),
    "as Q4_1": (Q8_0, Q4_1, Q4_0),
}
"""Formats of a model's matrices, which take turns."""


def asked() -> list[list[int]]:
    torch.manual_seed(1)
    return [
        torch.randint(3, SHAPE["vocab_size"], (count,)).tolist() for count in (1, 7, 40, 300, 500)
    ]


def loaded(folder: Path) -> Weights:
    """The weights as an engine has them."""
    device = torch.device("cuda")
    request = checked(
        ExecutorOptions(model_folder=folder, device="cuda"), "cuda", cuda.capabilities
    )
    return load_weights(request, device, lambda *_: None, cuda.stored_forms(request))


@pytest.mark.parametrize("dtype", long_but(["bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize("formats", SETS.values(), ids=SETS)
def test_a_model_in_blocks_answers_as_its_weights_expanded_to_the_bit(
    formats: tuple[BlockFormat, ...], dtype: str, tmp_path: Path
) -> None:
    packed, expanded = write_blocks(tmp_path, formats, dtype, is_tied=len(formats) == 1)
    together = answers(packed, asked())
    assert together == answers(expanded, asked())
    assert together == answers(packed, asked(), max_num_batched_tokens=64)
    assert together[:2] == [answers(packed, [prompt])[0] for prompt in asked()[:2]]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_gguf_file_answers_as_its_weights_expanded_to_the_bit(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path, kind, "bfloat16")
    assert answers(folder, asked()) == answers(tmp_path / "expanded", asked())


@pytest.mark.parametrize("formats", SETS.values(), ids=SETS)
def test_all_matrices_stay_packed_within_three_percent_of_the_file(
    formats: tuple[BlockFormat, ...], tmp_path: Path
) -> None:
    packed, _ = write_blocks(tmp_path, formats, "bfloat16", is_tied=True)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    weights = loaded(packed)
    assert {linear.kind for linear in weights.linears.values()} == {"planes"}
    assert isinstance(weights.table("embed"), PlanesTable)
    size = (packed / model_file.WEIGHTS_NAME).stat().st_size
    # The allocator rounds each tensor up to 512 bytes.
    assert torch.cuda.memory_allocated() - before < 1.03 * size + 512 * 2 * len(weights.linears) * 2


def test_float32_expands_them(tmp_path: Path) -> None:
    packed, expanded = write_blocks(tmp_path, (Q4_K,), "float32")
    assert {linear.kind for linear in loaded(packed).linears.values()} == {"dense"}
    assert answers(packed, [[5, 6, 7]]) == answers(expanded, [[5, 6, 7]])
