from __future__ import annotations

import pytest
import torch

from headwater.kernels.blocks import copy_blocks as copy_blocks_kernels
from headwater.kernels.blocks.copy_blocks import as_planes, copy_blocks, copy_blocks_twin
from tests.kernels.paging import GPU, POISON

SHAPES = [(2, 9, 3, 16, 64), (1, 5, 1, 128, 128), pytest.param((36, 64, 8, 64, 128), marks=GPU)]


def random_cache(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    layers, num_blocks, *rest = shape
    return torch.randn(
        layers, 2, num_blocks, *rest, generator=generator, device=generator.device
    ).to(dtype)


def ids(generator: torch.Generator, *blocks: int) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int32, device=generator.device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_copied_blocks_equal_their_sources_and_others_stay(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    source, target = (as_planes(random_cache(shape, generator, dtype)) for _ in range(2))
    expected = target.clone()
    sources = ids(generator, 1, 3, 1)
    targets = ids(generator, 0, 4, 2)
    copy_blocks(source, target, sources, targets)
    copy_blocks_twin(source, expected, sources, targets)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_that_leave_come_back_elsewhere_unchanged(
    shape: tuple[int, ...], generator: torch.Generator
) -> None:
    cache = as_planes(random_cache(shape, generator, torch.bfloat16))
    before = cache.clone()
    num_planes, _, num_words = cache.shape
    # As it crosses to the host: a block's planes one after another.
    staging = torch.full(
        (3, num_planes, num_words), int(POISON), dtype=torch.int32, device=cache.device
    )
    copy_blocks(cache, staging.transpose(0, 1), ids(generator, 4, 0), ids(generator, 0, 1))
    assert torch.equal(staging[:2], before[:, [4, 0]].transpose(0, 1))
    assert (staging[2] == int(POISON)).all()
    copy_blocks(staging.transpose(0, 1), cache, ids(generator, 0, 1), ids(generator, 2, 3))
    assert torch.equal(cache[:, [2, 3]], before[:, [4, 0]])
    assert torch.equal(cache[:, [0, 1, 4]], before[:, [0, 1, 4]])


def num_compiled() -> int:
    return sum(len(caches[0]) for caches in copy_blocks_kernels._copy.device_caches.values())


@GPU
def test_parts_of_lists_compile_no_other_kernel(generator: torch.Generator) -> None:
    cache = as_planes(random_cache((2, 9, 3, 16, 64), generator, torch.bfloat16))
    blocks = ids(generator, *range(9))
    copy_blocks(cache, cache, blocks[:4], blocks[:4])
    known = num_compiled()
    for start in (1, 3, 4):
        copy_blocks(cache, cache, blocks[start : start + 4], blocks[:4])
        copy_blocks(cache, cache, blocks[:4], blocks[start : start + 4])
    assert num_compiled() == known > 0
