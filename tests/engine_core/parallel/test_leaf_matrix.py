"""Weights whose leaves stay in one matrix, in plain torch and over groups of ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from headwater.bench.workloads import PACKINGS, TINY
from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.ranks.rank import whole_rank
from headwater.engine_core.layers.leaf_matrix import LeafLinear, SummedLeafLinear, keep_leaves
from headwater.engine_core.layers.leaves import of_leaves
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.int4 import Int4Linear
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.layers.platform import Platform
from headwater.engine_core.layers.process_group import Alone, Group
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.parallel.memory_group import MemoryGroup, create_group
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.layout import Layout, Split, joined_linear, linear
from headwater.engine_core.weights.shards import NUM_LEAVES, WHOLE, Shard
from tests.engine_core import test_int4_weights
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.small_models import convert

LAYOUT: Layout = {"qkv": joined_linear((64, 32, 32), 48), "o": linear(48, 64, split=Split.INPUTS)}


def weights_of(shard: Shard, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """A rank's part of the same random weights."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(spec.shape, generator=generator).to(dtype)
        for name, spec in LAYOUT.items()
    }
    return keep_leaves(load_weights(LAYOUT, tensors, dtype, shard), LAYOUT, shard)


def products(shard: Shard, group: Group, x: torch.Tensor) -> torch.Tensor:
    """What a rank makes of x with the weight whose inputs are divided."""
    part = weights_of(shard).linears["o"]
    assert isinstance(part, LeafLinear)
    return SummedLeafLinear(part, part.product, group).product(x.chunk(shard.size, 1)[shard.index])


def test_divided_inputs_are_leaves_of_one_matrix_and_divided_outputs_a_dense_one() -> None:
    for size in (1, 2, 4, 8):
        part = weights_of(Shard(size - 1, size))
        o = part.linears["o"]
        qkv = part.linears["qkv"]
        assert isinstance(o, LeafLinear)
        assert (o.num_leaves, o.is_whole, o.weight.shape) == (
            NUM_LEAVES // size,
            size == 1,
            (48, 64 // size),
        )
        assert isinstance(qkv, DenseLinear)
        assert o.weight.dtype == qkv.weight.dtype == torch.bfloat16


def test_any_number_of_ranks_makes_the_same_bits() -> None:
    x = torch.randn(5, 64).bfloat16()
    whole = products(WHOLE, Alone(), x)
    assert whole.dtype == x.dtype
    o = weights_of(WHOLE).linears["o"]
    assert isinstance(o, LeafLinear)
    torch.testing.assert_close(
        whole.double(), x.double() @ o.weight.double().t(), rtol=1e-2, atol=1e-2
    )
    for size in (2, 4, 8):
        groups = [MemoryGroup(rank, end) for rank, end in enumerate(create_group(size))]
        with ThreadPoolExecutor(size) as pool:
            shards = [Shard(rank, size) for rank in range(size)]
            found = list(pool.map(products, shards, groups, [x] * size))
        for group in groups:
            group.close()
        assert all(torch.equal(each, whole) for each in found), size


def test_a_rank_with_all_leaves_asks_no_other() -> None:
    """Ranks of stages alone have no group that adds."""
    weights = weights_of(WHOLE)
    made = of_leaves(weights, LAYOUT, cast(Platform, None), cast(Group, None))
    assert made.linears == weights.linears


def test_a_group_adds_neighbours_in_float32_and_rounds_once() -> None:
    parts = list(
        torch.randn(4, 6, 50).mul(torch.tensor([1.0, 100.0, 1e4, 10.0])[:, None, None]).unbind()
    )
    groups = [MemoryGroup(rank, end) for rank, end in enumerate(create_group(4))]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda group, part: group.tree_sum(part, torch.bfloat16), groups, parts)
        )
    for group in groups:
        group.close()
    expected = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert all(torch.equal(each, expected.bfloat16()) for each in found)
    assert not torch.equal(expected, parts[0] + parts[1] + parts[2] + parts[3])
    assert torch.equal(Alone().tree_sum(parts[0], torch.bfloat16), parts[0].bfloat16())


def test_packed_weights_are_expanded(tmp_path: Path) -> None:
    test_int4_weights.write(tmp_path, "gptq", "bfloat16")
    folder = convert(tmp_path / "packed", tmp_path / "ours", "bfloat16")
    config = registry.read_config(folder)
    layout = model_class(config).layout(config)
    packed = load_weights(layout, model_file.load(folder, torch.device("cpu")), torch.bfloat16)
    kept = keep_leaves(packed, layout, WHOLE)
    assert {type(each) for each in kept.linears.values()} == {LeafLinear, DenseLinear}
    for name in ("layers.0.qkv", "layers.0.o"):
        linear = kept.linears[name]
        was = packed.linears[name]
        assert isinstance(was, Int4Linear)
        assert isinstance(linear, LeafLinear | DenseLinear)
        assert torch.equal(linear.weight, was.expanded())


def test_inputs_without_equal_leaves_are_refused_by_name() -> None:
    layout = {"o": linear(16, 36, split=Split.INPUTS)}
    weights = load_weights(layout, {"o": torch.zeros(16, 36)}, torch.float32)
    with pytest.raises(
        ConfigError,
        match="numerics is 'tree'; allowed: default for o, whose 36 are no multiple of 8",
    ):
        keep_leaves(weights, layout, WHOLE)


def test_what_a_gpu_does_not_make_alike_is_refused_by_name(tmp_path: Path) -> None:
    _, folder = folder_of(QWEN3, tmp_path)
    options = ExecutorOptions(model_folder=folder, numerics="tree", block_size=64)
    request = checked(options, "cuda", cuda.capabilities)
    with pytest.raises(
        ConfigError, match="dtype is 'float32'; allowed: bfloat16 or float16 with numerics tree"
    ):
        cuda.build_executor(request, whole_rank(request.model), lambda phase, done, total: None)


@pytest.mark.parametrize(("packing", "rounds_to"), [("int8", "int8"), ("fp8", "fp8")])
def test_tokens_that_a_checkpoint_rounds_are_refused_by_name(
    packing: str, rounds_to: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(TINY | {"quantization_config": PACKINGS[packing]})
    )
    options = ExecutorOptions(
        model_folder=tmp_path, numerics="tree", load_format="dummy", block_size=64
    )
    with pytest.raises(ConfigError) as caught:
        checked(options, "cuda", cuda.capabilities)
    allowed = f"default with activations in {rounds_to}, which activation_dtype says"
    assert str(caught.value) == f"numerics is 'tree'; allowed: {allowed}"
    assert checked(replace(options, activation_dtype="model"), "cuda", cuda.capabilities).is_tree
