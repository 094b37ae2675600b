from __future__ import annotations

import pytest
import torch

from headwater.kernels.blocks import copy_blocks as copy_blocks_kernels
from headwater.kernels.blocks.copy_blocks import copy_blocks, copy_blocks_twin, pull_blocks
from tests.kernels.paging import GPU

SIZES = [(9, 77), (5, 8192 + 16), pytest.param(64, 36 * 65_536, marks=GPU)]
"""Blocks, and words of each."""


def random_blocks(num_blocks: int, num_words: int, generator: torch.Generator) -> torch.Tensor:
    size = num_blocks, num_words
    device = generator.device
    return torch.randint(1 << 31, size, generator=generator, device=device, dtype=torch.int32)


def ids(generator: torch.Generator, *blocks: int) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int32, device=generator.device)


@pytest.mark.parametrize(("num_blocks", "num_words"), SIZES)
def test_copied_blocks_equal_their_sources_and_others_stay(
    num_blocks: int, num_words: int, generator: torch.Generator
) -> None:
    source, target = (random_blocks(num_blocks, num_words, generator) for _ in range(2))
    expected = target.clone()
    sources = ids(generator, 1, 3, 1)
    targets = ids(generator, 0, 4, 2)
    copy_blocks(source, target, sources, targets)
    copy_blocks_twin(source, expected, sources, targets)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(("num_blocks", "num_words"), SIZES)
@pytest.mark.parametrize("num_programs", [1, 7, 96])
def test_blocks_behind_an_address_come_as_they_are_and_others_stay(
    num_blocks: int, num_words: int, num_programs: int, generator: torch.Generator
) -> None:
    # The other memory has another number of blocks.
    source = random_blocks(num_blocks + 1, num_words, generator)
    target = random_blocks(num_blocks, num_words, generator)
    expected = target.clone()
    sources = ids(generator, 1, num_blocks, 1)
    targets = ids(generator, 0, 3, 2)
    pull_blocks(source.data_ptr(), target, sources, targets, num_programs)
    copy_blocks_twin(source, expected, sources, targets)
    assert torch.equal(target, expected)


def test_no_blocks_are_no_launch(generator: torch.Generator) -> None:
    memory = random_blocks(5, 16, generator)
    pull_blocks(0, memory, ids(generator), ids(generator))
    copy_blocks(memory, memory, ids(generator), ids(generator))


def num_compiled() -> int:
    return sum(len(caches[0]) for caches in copy_blocks_kernels._copy.device_caches.values())


@GPU
def test_parts_of_lists_compile_no_other_kernel(generator: torch.Generator) -> None:
    memory = random_blocks(9, 96, generator)
    blocks = ids(generator, *range(9))
    copy_blocks(memory, memory, blocks[:4], blocks[:4])
    known = num_compiled()
    for start in (1, 3, 4):
        copy_blocks(memory, memory, blocks[start : start + 4], blocks[:4])
        copy_blocks(memory, memory, blocks[:4], blocks[start : start + 4])
    assert num_compiled() == known > 0
