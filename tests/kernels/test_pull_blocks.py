from __future__ import annotations

import pytest
import torch

from headwater.kernels.blocks.copy_blocks import as_planes, copy_blocks_twin
from headwater.kernels.blocks.pull_blocks import pull_blocks
from tests.kernels.paging import GPU
from tests.kernels.test_copy_blocks import ids, random_cache

SHAPES = [(2, 9, 3, 16, 64), (1, 5, 1, 128, 128), pytest.param((36, 64, 8, 64, 128), marks=GPU)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_programs", [1, 7, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_blocks_behind_an_address_come_as_they_are_and_others_stay(
    shape: tuple[int, ...], num_programs: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    source = as_planes(random_cache(shape, generator, dtype))
    # The other cache may have another number of blocks.
    target = as_planes(random_cache((shape[0], shape[1] - 1, *shape[2:]), generator, dtype))
    expected = target.clone()
    sources = ids(generator, 1, 4, 1)
    targets = ids(generator, 0, 3, 2)
    pull_blocks(source.data_ptr(), shape[1], target, sources, targets, num_programs)
    copy_blocks_twin(source, expected, sources, targets)
    assert torch.equal(target, expected)


def test_no_blocks_are_no_launch(generator: torch.Generator) -> None:
    cache = as_planes(random_cache(SHAPES[0], generator, torch.bfloat16))  # type: ignore[arg-type]
    pull_blocks(0, 9, cache, ids(generator), ids(generator))
