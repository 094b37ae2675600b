"""Tiles of the product for many rows: shapes, order, and applicability. Knows nothing about
multiplying."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tiles:
    block_m: int
    block_n: int
    num_stages: int
    """Number of blocks of rows and of weights in shared memory."""
    rate: float
    """Products that one multiprocessor makes in a unit of time, relative to the largest
    `WideTiles`."""

    def time(self, m: int, n: int, k: int, num_multiprocessors: int) -> float:
        """Predicted time of [m, k] x [n, k]: rounds of multiprocessors that each make one tile at a
        time."""
        rounds = self.count(m, n) / num_multiprocessors
        depth = (math.ceil(rounds) + CROWDING * rounds) * k + self.start(math.ceil(rounds))
        return depth * self.block_m * self.block_n / self.rate

    def start(self, num_rounds: int) -> int:
        """Time in which programs of all rounds fill their stages and store their tiles without
        multiplying, in steps along K."""
        raise NotImplementedError

    def count(self, m: int, n: int) -> int:
        """Number of tiles of a product [m, n]."""
        return -(-m // self.block_m) * -(-n // self.block_n)


@dataclass(frozen=True, slots=True)
class WideTiles(Tiles):
    """Tiles of `wide_gemm` for any GPU and dtype: a program makes one. Blocks are powers of two."""

    block_k: int = 64
    """Number of elements of two bytes along K; a tile of four-byte elements has half as many."""

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    def start(self, num_rounds: int) -> int:
        return 960 * num_rounds

    def shared_bytes(self, itemsize: int) -> int:
        """Upper bound for all stages and the product, which takes their place if its elements have
        two bytes, in bytes."""
        stages = self.num_stages * (self.block_m + self.block_n) * self.block_k * 2
        product = self.block_m * self.block_n * itemsize
        # Parts begin at rounded addresses, and each stage has barriers.
        return (stages + product if itemsize > 2 else max(stages, product)) + 512


@dataclass(frozen=True, slots=True)
class TeamTiles(Tiles):
    """Tiles of `hopper_wide_gemm`. Columns are a power of two or the sum of two: weights are read
    in two parts."""

    num_teams: int
    chunk: int = 64
    """Number of columns of the product that a team stores at a time, from one of two places in
    shared memory."""

    @property
    def team_rows(self) -> int:
        return self.block_m // self.num_teams

    @property
    def first_n(self) -> int:
        """Number of columns in the first part."""
        return 1 << (self.block_n.bit_length() - 1)

    def __str__(self) -> str:
        return (
            f"{self.block_m}x{self.block_n} by {'two teams' if self.num_teams == 2 else 'a team'}"
        )

    def start(self, num_rounds: int) -> int:
        # All tiles but a program's first overlap with products of other programs.
        return 620

    def shared_bytes(self) -> int:
        """Upper bound for all stages and the places of chunks, in bytes."""
        stages = self.num_stages * (self.block_m + self.block_n) * 128
        rest_n = self.block_n - self.first_n
        columns = 2 * self.chunk + (rest_n if rest_n < self.chunk else 0)
        return stages + self.block_m * columns * 2 + 512


# Rates, CROWDING and starts are fitted to times on an H200: `headwater.bench.gpu_kernels --only
# products` takes them.
TILES = (
    WideTiles(64, 256, 5, 1.0),
    WideTiles(64, 128, 8, 0.74),
    WideTiles(64, 64, 6, 0.48, block_k=128),
    WideTiles(64, 32, 8, 0.25, block_k=128),
)
TEAM_TILES = (
    TeamTiles(128, 256, 4, 0.96, 2),
    TeamTiles(128, 288, 4, 0.94, 2, chunk=32),
    TeamTiles(128, 192, 5, 0.95, 2, chunk=32),
    TeamTiles(128, 128, 6, 0.93, 2),
    TeamTiles(64, 192, 6, 0.76, 1),
    TeamTiles(64, 144, 8, 0.66, 1, chunk=32),
    TeamTiles(64, 128, 9, 0.71, 1, chunk=32),
    TeamTiles(64, 96, 9, 0.56, 1, chunk=32),
    TeamTiles(64, 64, 12, 0.43, 1),
)
"""Tiles of teams. Widths between the powers of two are for weights of which those leave many
multiprocessors idle in the last round; 144 and 288 divide 576."""
CROWDING = 0.22
"""Share of a round's time that grows with the number of tiles: programs read through one cache."""
SHARED_BYTES = 227 << 10
"""Bytes of shared memory of a multiprocessor that one program may have."""
GROUP = 8
"""Number of consecutive tiles of rows that use the same weights, which stay in the L2 cache."""


def fitting_tiles(dtype: torch.dtype, *, has_teams: bool) -> tuple[WideTiles | TeamTiles, ...]:
    """Tiles that fit into shared memory, the largest of their kind first. Teams multiply elements
    of two bytes, on Hopper."""
    some = tuple(tiles for tiles in TILES if tiles.shared_bytes(dtype.itemsize) <= SHARED_BYTES)
    return (*TEAM_TILES, *some) if has_teams and dtype.itemsize == 2 else some


def choose_wide(
    m: int, n: int, k: int, dtype: torch.dtype, num_multiprocessors: int, *, has_teams: bool
) -> WideTiles | TeamTiles:
    """The tiles that take the least time for [m, k] x [n, k]."""
    fitting = fitting_tiles(dtype, has_teams=has_teams)
    return min(fitting, key=lambda tiles: tiles.time(m, n, k, num_multiprocessors))


@triton.jit
def place(i_tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of a tile."""
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = tl.cdiv(n, BLOCK_N)
    in_group = GROUP * num_n
    first_m = i_tile // in_group * GROUP
    rows = tl.minimum(num_m - first_m, GROUP)
    return (first_m + i_tile % in_group % rows) * BLOCK_M, i_tile % in_group // rows * BLOCK_N
