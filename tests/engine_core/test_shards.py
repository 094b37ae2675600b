"""Parts of a model's weights as tensor-parallel ranks have them, beside the whole ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.layers.linear.linear import Linear
from headwater.engine_core.layers.linear.packed import pack_linears
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.dummy import dummy
from headwater.engine_core.weights.layout import Layout, Split, WeightSpec
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.shards import ParallelLayout, Shard, check_layout, local_config
from headwater.kernels.cpu.packed_linear import can_pack
from tests.engine_core import test_block_weights, test_byte_weights, test_int4_weights
from tests.engine_core.byte_checkpoint import BYTE_FORMS
from tests.engine_core.packed_checkpoint import FORMS
from tests.engine_core.small_models import FAMILIES, convert, random_checkpoint

CPU = torch.device("cpu")
DIVIDED = [family for family in FAMILIES if not family.startswith("gemma3")]
QWEN3 = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 768,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
)


def layout_of(folder: Path) -> Layout:
    config = registry.read_config(folder)
    return model_class(config).layout(config)


def part(folder: Path, index: int, size: int) -> Weights:
    tensors = model_file.load(folder, CPU, keeps_packed=True)
    return load_weights(layout_of(folder), tensors, torch.float32, Shard(index, size))


def joined(parts: list[torch.Tensor], spec: WeightSpec, dim: int) -> torch.Tensor:
    """The whole of what ranks have of each piece. Ranks with the same rows have equal parts."""
    shards = [Shard(index, len(parts)) for index in range(len(parts))]
    numbers = range(len(spec.pieces))
    of_ranks = [each.split([len(shards[0].rows(spec, i)) for i in numbers], dim) for each in parts]
    pieces = []
    for i in numbers:
        by_rows: dict[range, torch.Tensor] = {}
        for shard, own in zip(shards, of_ranks, strict=True):
            assert torch.equal(by_rows.setdefault(shard.rows(spec, i), own[i]), own[i])
        pieces += by_rows.values()
    return torch.cat(pieces, dim)


def outputs_of(spec: WeightSpec, x: torch.Tensor, parts: list[Linear]) -> torch.Tensor:
    """The whole layer's product, made of the parts' products."""
    split = spec.split
    if split is Split.INPUTS:
        inputs = x.chunk(len(parts), dim=1)
        return torch.stack(
            [each.product(own) for each, own in zip(parts, inputs, strict=True)]
        ).sum(0)
    products = [each.product(x) for each in parts]
    if split is Split.NONE:
        # Routers are whole on every rank.
        assert all(torch.equal(each, products[0]) for each in products)
        return products[0]
    if split is Split.VOCABULARY:
        return torch.cat(products, dim=1)
    return joined(products, spec, dim=1)


def check_parts(folder: Path, size: int) -> None:
    layout = layout_of(folder)
    whole = part(folder, 0, 1)
    parts = [part(folder, index, size) for index in range(size)]
    for name, linear in whole.linears.items():
        spec = layout[name]
        x = torch.randn(3, linear.in_features)
        made = outputs_of(spec, x, [each.linears[name] for each in parts])
        torch.testing.assert_close(made, linear.product(x), rtol=2e-3, atol=2e-3)
    for name, tensor in whole.tensors.items():
        if layout[name].split is Split.VOCABULARY:
            assert torch.equal(torch.cat([each.tensors[name] for each in parts]), tensor)
        elif layout[name].split is Split.OUTPUTS:
            own = [each.tensors[name] for each in parts]
            assert torch.equal(joined(own, layout[name], dim=0), tensor)
        else:
            assert all(torch.equal(each.tensors[name], tensor) for each in parts)
    ids = torch.arange(layout["embed"].shape[0])
    for name, table in whole.tables.items():
        assert torch.equal(
            torch.cat(
                [each.tables[name].rows(ids[: each.tables[name].weight.num_rows]) for each in parts]
            ),
            table.rows(ids),
        )


@pytest.mark.parametrize("family", DIVIDED)
def test_the_parts_of_two_ranks_make_the_whole_layers_of_each_family(
    family: str, tmp_path: Path
) -> None:
    random_checkpoint(family, tmp_path / "hf")
    check_parts(convert(tmp_path / "hf", tmp_path / "ours"), 2)


@pytest.mark.parametrize("form", FORMS)
def test_the_parts_of_four_bit_layers_make_the_whole_ones(form: str, tmp_path: Path) -> None:
    test_int4_weights.write(tmp_path, form)
    folder = convert(tmp_path / "packed", tmp_path / "ours")
    check_parts(folder, 2)
    with pytest.raises(
        ConfigError, match=r"inputs of a rank of layers\.0\.o is 16; allowed: multiples of 32"
    ):
        part(folder, 0, 4)


@pytest.mark.parametrize("form", BYTE_FORMS)
def test_the_parts_of_eight_bit_layers_make_the_whole_ones(form: str, tmp_path: Path) -> None:
    test_byte_weights.write(tmp_path, form)
    folder = convert(tmp_path / "packed", tmp_path / "ours")
    if "W8A8" not in form:
        check_parts(folder, 2)
        return
    # A token is rounded with one scale, which no rank could know.
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size of layers\.0\.\w+ is 2; allowed: 1 with weights"
    ):
        part(folder, 0, 2)
    options = ExecutorOptions(
        model_folder=folder, device="cpu", max_model_len=64, tensor_parallel_size=2
    )
    with pytest.raises(
        ConfigError,
        match="tensor_parallel_size is 2; allowed: 1 with weights whose tokens are rounded",
    ):
        checked(options, cpu.name, cpu.capabilities)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_the_parts_of_weights_in_block_formats_make_the_whole_ones(
    kind: str, tmp_path: Path
) -> None:
    check_parts(test_block_weights.write(tmp_path, kind), 2)


def test_a_unit_of_a_block_format_stays_whole(tmp_path: Path) -> None:
    folder = test_block_weights.write(tmp_path, "Q8_0")
    with pytest.raises(
        ConfigError,
        match=r"inputs of a rank of layers\.0\.o is 16; allowed: multiples of 32, as q8_0",
    ):
        part(folder, 1, 4)


def test_a_vocabulary_that_the_ranks_do_not_divide_leaves_the_last_one_fewer_tokens() -> None:
    assert [Shard(index, 3).vocabulary(512) for index in range(3)] == [
        range(192),
        range(192, 384),
        range(384, 512),
    ]


@pytest.mark.skipif(not can_pack(torch.float32), reason="not on this CPU")
def test_packed_files_of_ranks_are_their_own_though_their_shapes_are_equal(tmp_path: Path) -> None:
    random_checkpoint("qwen3", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    for _ in range(2):
        for index in range(2):
            plain = part(folder, index, 2)
            packed = pack_linears(plain, folder, lambda done, total: None, part=f"{index} of 2")
            for name, linear in plain.linears.items():
                x = torch.randn(5, linear.in_features)
                torch.testing.assert_close(
                    packed.linears[name].product(x), linear.product(x), rtol=1e-4, atol=1e-4
                )
    assert len(list(folder.glob("packed-*"))) == 2


READ = """
import os, sys, torch
from pathlib import Path
from tests.engine_core.test_shards import part
for size in map(int, sys.argv[2:]):
    if os.fork():
        os.wait()
        continue
    weights = part(Path(sys.argv[1]), 0, size)
    for linear in weights.linears.values():
        linear.product(torch.ones(1, linear.in_features))
    for tensor in weights.tensors.values():
        tensor.sum()
    maps = Path("/proc/self/smaps").read_text().split("weights.safetensors")[1:]
    print(sum(int(each.split("Rss:")[1].split()[0]) for each in maps), flush=True)
    os._exit(0)
"""
"""Prints how many KiB of the weights' pages the first rank of so many has read, each in a process
of its own."""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_reads_the_pages_of_its_part_alone(tmp_path: Path) -> None:
    """Outputs and rows of tokens; a share of the inputs lies on every row's pages."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    folder = random_folder(
        tmp_path, sizes | {"vocab_size": 16384, "head_dim": 64, "num_hidden_layers": 1}
    )
    command = [sys.executable, "-c", READ, str(folder), "1", "4"]
    read = [
        int(size)
        for size in subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()
    ]
    total = (folder / model_file.WEIGHTS_NAME).stat().st_size // 1024
    assert read[0] > 0.95 * total
    assert read[1] < 0.5 * total


def random_folder(tmp_path: Path, sizes: dict[str, int]) -> Path:
    """A converted model with random weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    } | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = layout_of(tmp_path)
    model_file.save(dummy(layout, torch.float32, CPU), tmp_path)
    return tmp_path


def test_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do() -> None:
    for size in (1, 2, 3, 6, 12):
        check_layout(ParallelLayout(tensor=size), QWEN3, size_multiple=16)
    for size in (0, 4, 5, 24):
        with pytest.raises(
            ConfigError,
            match=rf"tensor_parallel_size is {size}; allowed: 1 or 2 or 3 or 6 or 12, which divide 12 query heads, "
            r"6 KV heads \(or are multiples\) and 192 of an MLP",
        ):
            check_layout(ParallelLayout(tensor=size), QWEN3, size_multiple=16)
    with pytest.raises(ConfigError, match="allowed: 1 or 3, which divide"):
        check_layout(
            ParallelLayout(tensor=2), replace(QWEN3, intermediate_size=48), size_multiple=16
        )
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4; allowed: 1…3 for 3 layers"):
        check_layout(ParallelLayout(pipeline=4), QWEN3, size_multiple=16)


def test_ranks_divide_a_norm_over_all_heads_and_the_heads_under_it() -> None:
    normed = replace(QWEN3, width_norms=True)
    check_layout(ParallelLayout(tensor=6), normed, size_multiple=16)
    with pytest.raises(ConfigError, match="allowed: 1 or 2 or 3 or 6, which divide 12 query heads"):
        check_layout(ParallelLayout(tensor=12), normed, size_multiple=16)


def test_ranks_beyond_the_kv_heads_have_one_that_others_have_too(tmp_path: Path) -> None:
    assert [Shard(index, 4).heads(2) for index in range(4)] == [
        range(1),
        range(1),
        *[range(1, 2)] * 2,
    ]
    random_checkpoint("qwen3", tmp_path / "hf", attention_bias=True)
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    config = registry.read_config(folder)
    whole = part(folder, 0, 1)
    x = torch.randn(3, config.hidden_size)
    queries, keys, values = whole.linears["layers.1.qkv"].product(x).split(config.qkv_sizes, 1)
    biases = whole.tensors["layers.1.qkv_bias"].split(config.qkv_sizes)
    for index in range(4):
        own = part(folder, index, 4)
        own_keys, own_values = (each.chunk(2, 1)[index // 2] for each in (keys, values))
        expected = torch.cat([queries.chunk(4, 1)[index], own_keys, own_values], 1)
        torch.testing.assert_close(own.linears["layers.1.qkv"].product(x), expected)
        pieces = biases[0].chunk(4)[index], *(each.chunk(2)[index // 2] for each in biases[1:])
        assert torch.equal(own.tensors["layers.1.qkv_bias"], torch.cat(pieces))


def test_the_layers_of_a_rank_have_its_share_of_the_heads() -> None:
    local = local_config(QWEN3, Shard(1, 3))
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size, local.vocab_size) == (
        4,
        2,
        64,
        768,
    )
