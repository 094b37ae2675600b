"""Weights in blocks of 128 inputs, multiplied with tokens that are rounded by as many: what a
platform makes of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.engine_core.layers.linear.division import keeps_divided
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.layers.linear.ordered import OrderedLinear, order_linears
from headwater.engine_core.layers.linear.rounded import RoundedLinear
from headwater.engine_core.layers.staged import layer_of
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.blocks import Parts
from headwater.engine_core.weights.shards import WHOLE, Shard
from headwater.kernels.gemm import w8a8
from headwater.kernels.quant.byte_weights import ByteWeight
from headwater.kernels.quant.token_rounding import Rounding, round_tokens_twin
from tests.engine_core.fp8_block_models import written_blocks

ROUNDING = Rounding(torch.float8_e4m3fn, 128)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written_blocks(tmp_path)[0]


def loaded(folder: Path, shard: Shard = WHOLE, *, rounds_tokens: bool = True) -> Weights:
    config = registry.read_config(folder)
    tensors = model_file.load(folder, torch.device("cpu"), keeps_packed=True)
    # Layers take the memory of what they are made of, and a file's pages are read-only.
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = load_weights(model_class(config).layout(config), own, torch.bfloat16, shard)
    return order_linears(weights, rounds_tokens=rounds_tokens)


def rounded(weights: Weights, name: str) -> RoundedLinear:
    linear = weights.linears[f"layers.1.{name}"]
    assert isinstance(linear, RoundedLinear)
    return linear


@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_layers_round_tokens_by_blocks_and_stay_near_the_weights_of_the_file(
    folder: Path, name: str
) -> None:
    own = rounded(loaded(folder), name)
    exact = loaded(folder, rounds_tokens=False).linears[f"layers.1.{name}"]
    assert own.rounds_to == ROUNDING
    assert isinstance(exact, OrderedLinear)
    x = torch.randn(5, own.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    # A token whose second half is small: one scale for all of it would lose that half's numbers.
    x[1, own.in_features // 2 :] *= 2**-12
    expected = exact.product(x).float()
    assert float((own.product(x).float() - expected).norm() / expected.norm()) < 0.04
    half = x[1:2].clone()
    half[:, : own.in_features // 2] = 0
    small = exact.product(half).float()
    assert float((own.product(half).float() - small).norm() / small.norm()) < 0.06


@pytest.mark.parametrize("name", ["o", "down"])
def test_ranks_that_divide_inputs_by_whole_blocks_round_as_one_process_does(
    folder: Path, name: str
) -> None:
    whole = rounded(loaded(folder), name)
    parts = [rounded(loaded(folder, Shard(index, 2)), name) for index in range(2)]
    assert [part.in_features for part in parts] == [whole.in_features // 2] * 2
    x = torch.randn(3, whole.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = [round_tokens_twin(each.contiguous(), ROUNDING) for each in x.chunk(2, dim=1)]
    expected = round_tokens_twin(x, ROUNDING)
    assert torch.equal(
        torch.cat([each.values.view(torch.uint8) for each in tokens], 1),
        expected.values.view(torch.uint8),
    )
    assert torch.equal(torch.cat([each.scales for each in tokens]), expected.scales)
    for suffix in ("values", "scales"):
        kept = torch.cat([getattr(part.weight, suffix).view(torch.uint8) for part in parts], 1)
        assert torch.equal(kept, getattr(whole.weight, suffix).view(torch.uint8)), suffix


def test_ranks_that_divide_outputs_have_their_blocks(folder: Path) -> None:
    whole = rounded(loaded(folder), "gate_up").weight
    first = rounded(loaded(folder, Shard(0, 2)), "gate_up").weight
    # The first half of the gates and of the ups, in blocks of 64.
    expected = torch.cat([whole.scales[:6], whole.scales[12:18]])
    assert torch.equal(first.scales, expected)


def keeps_rounded(name: str, weight: ByteWeight | Parts) -> bool:
    return not isinstance(weight, tuple) and layer_of(name) is not None and w8a8.fits(weight)


@pytest.mark.parametrize(("size", "expanded"), [(1, set()), (2, set()), (4, {"down"})])
def test_ranks_keep_what_all_of_them_multiply_as_it_is(
    folder: Path, size: int, expanded: set[str]
) -> None:
    """Four ranks expand `down`: each has one and a half blocks of its inputs."""
    config = registry.read_config(folder)
    layout = model_class(config).layout(config)
    for index in range(size):
        shard = Shard(index, size)
        tensors = model_file.load(
            folder, torch.device("cpu"), keeps=keeps_divided(layout, shard, keeps_rounded)
        )
        weights = load_weights(
            layout, {name: each.clone() for name, each in tensors.items()}, torch.bfloat16, shard
        )
        kinds = {
            name: each.kind
            for name, each in order_linears(weights, rounds_tokens=True).linears.items()
        }
        assert kinds.pop("lm_head") == "dense"
        others = {name.rpartition(".")[2] for name, kind in kinds.items() if kind != "rounded"}
        assert others == expanded


@pytest.mark.parametrize(("width", "kind"), [(256, "rounded"), (192, "ordered")])
def test_all_experts_round_tokens_or_none_do(width: int, kind: str, tmp_path: Path) -> None:
    """192 inputs are one and a half blocks."""
    made, _ = written_blocks(tmp_path, "qwen3-moe", moe_intermediate_size=width)
    assert {each.kind for each in loaded(made).experts.values()} == {kind}
    exact = loaded(made, rounds_tokens=False).experts
    assert {each.kind for each in exact.values()} == {"ordered"}
