"""GGUF's block formats as planes: the same bits, from a converted file, whole and in the parts of
ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.layers.embedding import Embedding
from headwater.engine_core.layers.linear.division import keeps_divided
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.layers.linear.planes import PlanesLinear, PlanesTable
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.blocks import BLOCKS, PARTS, dense, named
from headwater.engine_core.weights.layout import Layout
from headwater.engine_core.weights.planes import PLANES, in_planes, put_all_in_planes, stored_planes
from headwater.engine_core.weights.shards import Shard
from headwater.kernels.quant.block_formats import FORMATS, Q4_K, Q5_0, Q8_0, BlockFormat, pack
from tests.engine_core.test_block_weights import KINDS, write
from tests.kernels.random_blocks import random_rows

CPU = torch.device("cpu")


def layout_of(folder: Path) -> Layout:
    config = registry.read_config(folder)
    return model_class(config).layout(config)


def in_planes_of(folder: Path, shard: Shard) -> Weights:
    """A rank's weights as a GPU has them."""
    layout = layout_of(folder)
    tensors = model_file.load(folder, CPU, keeps=keeps_divided(layout, shard))
    return load_weights(layout, tensors, torch.float32, shard, CPU, in_planes)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_planes_of_parts_have_the_bits_of_the_blocks(
    format: BlockFormat, dtype: torch.dtype
) -> None:
    parts = tuple(
        pack(random_rows(each, rows, 256, seed=rows), each)
        for each, rows in ((format, 21), (Q5_0, 16))
    )
    tensors = in_planes(named(parts, ""))
    layer = PlanesLinear.load(tensors, dtype)
    assert (layer.out_features, layer.in_features) == (37, 256)
    assert torch.equal(layer.expanded(), dense(parts, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_planes_has_the_products_and_rows_of_the_file_expanded(
    kind: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, kind)
    layout, tensors = (
        layout_of(folder),
        model_file.load(folder, CPU, keeps=lambda name, weight: True),
    )
    put_all_in_planes(tensors)
    assert not any(name.endswith(BLOCKS) for name in tensors)
    weights = load_weights(layout, tensors, torch.float32)
    expanded = load_weights(layout, model_file.load(folder, CPU), torch.float32)
    assert {linear.kind for linear in weights.linears.values()} == {PlanesLinear.kind}
    x = torch.randn(3, 64)
    ids = torch.tensor([5, 0, 511, 5])
    for name, linear in weights.linears.items():
        rows = x if linear.in_features == 64 else torch.randn(3, linear.in_features)
        assert torch.equal(linear.product(rows), expanded.linears[name].product(rows)), name
    assert torch.equal(
        Embedding(weights.table("embed"))(ids), Embedding(expanded.table("embed"))(ids)
    )


def test_a_head_that_is_the_embedding_shares_its_memory(tmp_path: Path) -> None:
    folder = write(tmp_path, "Q8_0", family="smollm2")
    layout, tensors = (
        layout_of(folder),
        model_file.load(folder, CPU, keeps=lambda name, weight: True),
    )
    assert layout["lm_head"].tied_to == "embed"
    put_all_in_planes(tensors)
    weights = load_weights(layout, tensors, torch.float32)
    table = weights.table("embed")
    head = weights.linears["lm_head"]
    assert isinstance(table, PlanesTable)
    assert isinstance(head, PlanesLinear)
    assert table.weight.words.data_ptr() == head.parts[0].words.data_ptr()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_of_ranks_have_the_bits_of_the_parts_expanded(
    kind: str, num_ranks: int, tmp_path: Path
) -> None:
    """What would be cut inside a block, as inputs of 4 ranks here, is expanded; the rest is in
    planes."""
    folder = write(tmp_path, kind)
    layout = layout_of(folder)
    seen = set()
    whole = model_file.load(folder, CPU)
    for index in range(num_ranks):
        shard = Shard(index, num_ranks)
        weights = in_planes_of(folder, shard)
        expanded = load_weights(layout, whole, torch.float32, shard, CPU)
        for name, linear in weights.linears.items():
            seen.add(linear.kind)
            x = torch.randn(2, linear.in_features)
            assert torch.equal(linear.product(x), expanded.linears[name].product(x)), name
        ids = torch.arange(8)
        assert torch.equal(
            Embedding(weights.table("embed"))(ids), Embedding(expanded.table("embed"))(ids)
        )
    assert seen == ({"planes"} if num_ranks == 2 else {"planes", "dense"})


def test_planes_that_do_not_fit_are_refused() -> None:
    tensors = in_planes(named([pack(random_rows(Q4_K, 16, 256), Q4_K)], ""))
    with pytest.raises(ConfigError, match=r"planes of weights is .*; allowed: uint8, \(\d+,\)"):
        stored_planes(tensors[PLANES][:-1], tensors[PARTS])
    other = tensors[PARTS].clone()
    other[0, 0] = Q8_0.type_id
    with pytest.raises(ConfigError, match="planes of weights is"):
        stored_planes(tensors[PLANES], other)
