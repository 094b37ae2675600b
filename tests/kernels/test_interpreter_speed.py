"""What the interpreter keeps is what Triton makes anew."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)


@triton.jit
def _sums(p_rows, p_sums, SIZE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, SIZE)
    tl.store(p_sums + row, tl.sum(tl.load(p_rows + row * SIZE + columns)))


def sums(rows: torch.Tensor) -> torch.Tensor:
    made = rows.new_empty(len(rows))
    _sums[(len(rows),)](rows, made, rows.shape[1])
    return made


def test_a_second_launch_finds_the_language_as_the_first_has_left_it() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    assert sums(rows).tolist() == [6.0, 22.0, 38.0]
    left = {
        (module, name): getattr(module, name)
        for module in (tl, tl.core)
        for name in ("load", "reduce", "arange")
    }
    assert sums(rows + 1).tolist() == [10.0, 26.0, 42.0]
    assert {(module, name): getattr(module, name) for module, name in left} == left


def test_a_block_has_the_sizes_of_its_constants() -> None:
    block = tl.block_type(tl.float32, [tl.constexpr(4), 2])
    assert (list(block.shape), block.numel, str(block)) == ([4, 2], 8, "<['4', '2'], fp32>")
    assert block == tl.block_type(tl.float32, tl.tuple([4, 2]))
    assert block != tl.block_type(tl.float32, [2, 4])
    tensor = tl.core.tensor(None, block)
    assert (tensor.shape, tensor.numel, tensor.dtype) == (tl.tuple([4, 2]), 8, tl.float32)
    number = tl.core.tensor(None, tl.int32)
    assert (len(number.shape), number.numel) == (0, 1)


@pytest.mark.parametrize(
    ("sizes", "refusal"),
    [([3], "power of 2"), ([2.0], "must have type"), ([], "0d block_type"), ([2**21], "exceeds")],
)
def test_sizes_of_no_block_are_refused_each_time(sizes: list[Any], refusal: str) -> None:
    tl.block_type(tl.float32, [2])
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=refusal):
            tl.block_type(tl.float32, sizes)


def test_a_tuple_equals_what_has_its_values() -> None:
    sizes = tl.tuple([2, 8])
    assert sizes == [2, 8]
    assert sizes == tl.tuple([tl.constexpr(2), tl.constexpr(8)])
    assert sizes != [8, 2]
    assert sizes != [2]


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        (tl.int1, np.bool_),
        (tl.bfloat16, np.uint16),
        (tl.float8e4nv, np.uint8),
        (tl.float32, np.float32),
        (tl.pointer_type(tl.float32), np.uint64),
    ],
    ids=str,
)
def test_a_type_has_its_array(type: Any, expected: Any) -> None:
    for _ in range(2):
        assert interpreter._get_np_dtype(type) == expected
        assert interpreter._get_np_dtype(tl.block_type(type, [4])) == expected
