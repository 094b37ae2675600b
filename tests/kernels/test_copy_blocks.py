from __future__ import annotations

import pytest
import torch

from headwater.kernels.copy_blocks import copy_blocks, copy_blocks_twin, gather_blocks, scatter_blocks
from tests.kernels.paging import GPU, POISON

SHAPES = [(2, 9, 3, 16, 64), (1, 5, 1, 128, 128), pytest.param((36, 64, 8, 64, 128), marks=GPU)]


def random_cache(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    layers, num_blocks, *rest = shape
    return torch.randn(layers, 2, num_blocks, *rest, generator=generator, device=generator.device).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
def test_copied_blocks_equal_their_sources_and_skipped_ones_stay(
    shape: tuple[int, ...], generator: torch.Generator
) -> None:
    cache = random_cache(shape, generator)
    expected = cache.clone()
    sources = torch.tensor([1, 3, 1], dtype=torch.int32, device=generator.device)
    targets = torch.tensor([0, 4, -1], dtype=torch.int32, device=generator.device)
    copy_blocks(cache, sources, targets)
    copy_blocks_twin(expected, sources, targets)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_that_leave_come_back_elsewhere_unchanged(shape: tuple[int, ...], generator: torch.Generator) -> None:
    cache = random_cache(shape, generator)
    before = cache.clone()
    leaving = torch.tensor([4, 0], dtype=torch.int32, device=generator.device)
    staging = torch.full_like(cache[:, :, :3], POISON)
    gather_blocks(cache, leaving, staging)
    assert torch.equal(staging[:, :, :2], before[:, :, [4, 0]])
    scatter_blocks(staging, cache, torch.tensor([2, 3], dtype=torch.int32, device=generator.device))
    assert torch.equal(cache[:, :, [2, 3]], before[:, :, [4, 0]])
    assert torch.equal(cache[:, :, [0, 1, 4]], before[:, :, [0, 1, 4]])
