"""Checks of the assembly by which bits do not depend on the number of ranks; no GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.kernels import tree_assembly

pytestmark = pytest.mark.long
MULTIPLY = re.compile(r"wgmma\.mma_async|mma\.sync")
ARITHMETIC = re.compile(
    r"\b(?:fma|mul|add|sub|div|rsqrt|ex2|max|min)\.[\w.]*f32\b|(?:shfl|mma|wgmma)\.[\w.]+"
)


@pytest.fixture(scope="module")
def programs() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", tree_assembly.__name__]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_leaves_are_added_beside_the_matrix_unit(programs: Any) -> None:
    """The compiler may let the matrix unit add a product to a sum, which has other bits; and a loop
    that it unrolls has more products."""
    assert len(programs["products"]) == 5
    for program in programs["products"]:
        tiles = program["tiles"]
        ptx = program["ptx"]
        assert len(MULTIPLY.findall(ptx)) == tiles["most_block_k"] // 16, tiles
        # Two where a leaf ends, and three behind the last.
        num_elements = tiles["block_m"] * tiles["block_n"] // (32 * tiles["num_warps"])
        assert len(re.findall(r"\badd\.f32", ptx)) == 5 * num_elements, tiles
        assert "ld.local" not in ptx, tiles


def test_heads_are_computed_alike_whatever_their_number(programs: Any) -> None:
    first, *others = programs["heads"]
    assert len(others) == len(tree_assembly.HEADS) - 1
    for name, ptx in first.items():
        expected = ARITHMETIC.findall(ptx)
        assert len(expected) > 50, name
        assert all(ARITHMETIC.findall(other[name]) == expected for other in others), name
