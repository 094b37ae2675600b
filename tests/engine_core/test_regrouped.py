"""GGUF's Q4_0 and Q8_0 as integers in groups: the same bits, where a platform has products for those."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.engine_core.layers.kinds import load_weights
from headwater.engine_core.layers.staged import layer_of
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.blocks import dense
from headwater.engine_core.weights.regrouped import regrouped
from headwater.kernels import byte_weights, int4_layout
from headwater.kernels.block_formats import Q4_0, Q4_1, Q8_0, BlockFormat, pack
from headwater.kernels.int4_layout import Int4Weight
from tests.engine_core.test_block_weights import write
from tests.kernels.random_blocks import random_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", [Q4_0, Q8_0], ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_integers_in_groups_have_the_bits_of_the_blocks(format: BlockFormat, dtype: torch.dtype) -> None:
    parts = tuple(pack(random_rows(format, num_rows, 96, seed=num_rows), format) for num_rows in (21, 16))
    weight = regrouped(parts)
    assert weight is not None
    assert weight.shape == (37, 96)
    found = (int4_layout if isinstance(weight, Int4Weight) else byte_weights).expand(weight, dtype)
    assert torch.equal(found, dense(parts, dtype))


def test_other_formats_and_parts_of_several_stay_blocks() -> None:
    simple, least = (pack(random_rows(format, 16, 64), format) for format in (Q4_0, Q4_1))
    assert regrouped((least,)) is None
    assert regrouped((simple, least)) is None


@pytest.mark.parametrize(("kind", "layers"), [("Q4_0", "int4"), ("Q8_0", "int8"), ("Q5_1", "dense")])
def test_a_file_keeps_what_the_platform_multiplies(kind: str, layers: str, tmp_path: Path) -> None:
    folder = write(tmp_path, kind)
    config = registry.read_config(folder)
    layout = model_class(config).layout(config)
    tensors = model_file.load(folder, CPU, keeps=lambda name, weight: layer_of(name) is not None)
    linears = load_weights(layout, tensors, torch.float32).linears
    assert {linear.kind for name, linear in linears.items() if name != "lm_head"} == {layers}
    assert linears["lm_head"].kind == "dense"
    expanded = load_weights(layout, model_file.load(folder, CPU), torch.float32).linears
    x = torch.randn(3, 64)
    assert torch.equal(linears["layers.1.qkv"].product(x), expanded["layers.1.qkv"].product(x))
