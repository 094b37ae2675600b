"""The hidden states that a decoder hands out are those that transformers computes, and cost a pass
nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.engine_core.executors.table.batch import ragged_batch
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import LayerInputs, Model, model_class
from headwater.engine_core.platforms.cpu import CpuPlatform
from headwater.engine_core.weights import model_file
from tests.engine_core.small_models import FAMILIES, WITH_STATES, convert, random_checkpoint

BLOCK_SIZE = 16
LENGTHS = [37, 5, 20]
TOKENS = torch.randint(
    3, 512, (3, 64), generator=torch.Generator().manual_seed(4), dtype=torch.int32
)
BLOCKS = torch.arange(1, 13, dtype=torch.int32).view(3, 4)


def decoder_of(folder: Path) -> Model:
    config = registry.read_config(folder)
    cls = model_class(config)
    tensors = model_file.load(folder, torch.device("cpu"))
    weights = load_weights(cls.layout(config), tensors, torch.float32)
    return cls(config, weights, CpuPlatform(config, BLOCK_SIZE), 64)


def cache_of(decoder: Model) -> torch.Tensor:
    config = decoder.config
    if config.latent is not None:
        return torch.zeros(config.num_layers, 13, BLOCK_SIZE, config.latent.cached_width)
    return torch.zeros(config.num_layers, 2, 13, config.num_kv_heads, BLOCK_SIZE, config.head_dim)


def batch_of(starts: list[int], counts: list[int], num_wanted: list[int]) -> ForwardBatch:
    rows = np.arange(3, dtype=np.int32)
    arrays = [np.array(values, np.int32) for values in (starts, counts, num_wanted)]
    return ragged_batch(rows, *arrays, TOKENS, BLOCKS, BLOCK_SIZE)


MIXED = "gemma4", "mimo"
OF_ONE_CACHE = [
    family for family in FAMILIES if family not in WITH_STATES and not family.startswith(MIXED)
]
"""Families whose layers all have keys and values of one shape, as this test lays them out."""


@pytest.mark.parametrize("family", OF_ONE_CACHE)
@torch.inference_mode()
def test_inputs_of_layers_are_those_of_transformers_in_chunks_and_behind_drafts(
    family: str, tmp_path: Path
) -> None:
    model = random_checkpoint(family, tmp_path / "hf")
    decoder = decoder_of(convert(tmp_path / "hf", tmp_path / "ours"))
    layers = tuple(range(decoder.config.num_layers))
    cache = cache_of(decoder)
    parts: list[tuple[dict[int, torch.Tensor], torch.Tensor, list[int]]] = []
    for starts, counts in (([0, 0, 0], [30, 4, 1]), ([30, 4, 1], [7, 1, 19])):
        inputs = LayerInputs(layers)
        final = decoder.forward(batch_of(starts, counts, [1, 1, 1]), cache, inputs=inputs)
        parts.append((inputs.states, final, counts))
    for row, length in enumerate(LENGTHS):
        expected = model(
            TOKENS[row : row + 1, :length].long(), output_hidden_states=True
        ).hidden_states
        for layer in layers:
            got = torch.cat([states[layer].split(counts)[row] for states, _, counts in parts])
            torch.testing.assert_close(got, expected[layer][0], atol=1e-3, rtol=1e-3)
        final = torch.cat([states.split(counts)[row] for _, states, counts in parts])
        torch.testing.assert_close(final, expected[-1][0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@torch.inference_mode()
def test_inputs_are_of_all_tokens_also_where_the_last_layer_computes_a_few(
    family: str, tmp_path: Path
) -> None:
    random_checkpoint(family, tmp_path / "hf")
    decoder = decoder_of(convert(tmp_path / "hf", tmp_path / "ours"))
    batch = batch_of([0, 0, 0], LENGTHS, [1, 0, 3])
    wanted = np.array([1, 0, 3], np.int32)
    whole = LayerInputs((0, 2))
    few = LayerInputs((0, 2))
    all_states = decoder.forward(batch, cache_of(decoder), inputs=whole)
    ends = decoder.forward(batch, cache_of(decoder), ends=decoder.ends(batch, wanted), inputs=few)
    assert few.states.keys() == {0, 2}
    assert all(torch.equal(few.states[layer], whole.states[layer]) for layer in (0, 2))
    assert torch.equal(ends, all_states[batch.sampled])
    assert torch.equal(
        ends, decoder.forward(batch, cache_of(decoder), ends=decoder.ends(batch, wanted))
    )
