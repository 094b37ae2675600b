"""Tiles of the product for many rows: shapes, order, and which of them serve. Knows nothing of what multiplies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class WideTiles:
    block_m: int
    block_n: int
    """A power of two, or, unless persistent, the sum of two: weights and product are read and written in two parts."""
    block_k: int
    """Elements of two bytes; a tile has half as many of four."""
    num_warps: int
    num_stages: int
    rate: float
    """Products in a unit of time by one of the programs that share a multiprocessor; of the largest tile 1."""
    persistent: bool = True
    """Otherwise each program makes one tile: its loop is shorter, and shared memory may have room for two programs."""

    def __post_init__(self) -> None:
        assert not self.persistent or self.first_n == self.block_n

    @property
    def first_n(self) -> int:
        """Columns of the first part."""
        return 1 << (self.block_n.bit_length() - 1)

    def __str__(self) -> str:
        name = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return name if self.persistent else f"{name} once x{self.num_stages}"

    def time(self, m: int, n: int, k: int, itemsize: int, num_multiprocessors: int) -> float:
        """Predicted time of [m, k] x [n, k]: rounds of programs that each make one tile at a time."""
        rounds = self.count(m, n) / (num_multiprocessors * self.resident(itemsize))
        starts = 1 if self.persistent else math.ceil(rounds)
        depth = (math.ceil(rounds) + CROWDING * rounds) * k + starts * START
        return depth * self.block_m * self.block_n / self.rate

    def count(self, m: int, n: int) -> int:
        """Number of tiles of a product [m, n]."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def shared_bytes(self, itemsize: int) -> int:
        """Upper bound for all stages and the product, which takes their place in a program of one tile of two bytes."""
        stages = self.num_stages * (self.block_m + self.block_n) * self.block_k * 2
        product = self.block_m * self.block_n * itemsize
        # Parts begin at rounded addresses, and each stage has barriers.
        return (stages + product if self.persistent or itemsize > 2 else max(stages, product)) + 512

    def resident(self, itemsize: int) -> int:
        """Programs that a multiprocessor runs at a time."""
        if self.persistent:
            return 1
        return (SHARED_BYTES + RESERVED_BYTES) // (self.shared_bytes(itemsize) + RESERVED_BYTES)


@dataclass(frozen=True, slots=True)
class TeamTiles:
    """Tiles of `hopper_wide_gemm`."""

    num_teams: int
    team_rows: int
    block_n: int
    """A power of two or the sum of two."""
    num_stages: int
    chunk: int = 64
    """Columns of the product that a team stores at a time, from one of two places in shared memory."""

    @property
    def block_m(self) -> int:
        return self.num_teams * self.team_rows

    @property
    def first_n(self) -> int:
        return 1 << (self.block_n.bit_length() - 1)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x64 {self.num_teams} teams x{self.num_stages}"

    def shared_bytes(self) -> int:
        """Upper bound for all stages and the places of chunks."""
        stages = self.num_stages * (self.block_m + self.block_n) * 128
        rest_n = self.block_n - self.first_n
        columns = 2 * self.chunk + (rest_n if rest_n < self.chunk else 0)
        return stages + self.block_m * columns * 2 + 512

    def count(self, m: int, n: int) -> int:
        """Number of tiles of a product [m, n]."""
        return -(-m // self.block_m) * -(-n // self.block_n)


# Rates, CROWDING and START are fitted to times on an H200: `headwater.bench.gpu_kernels --only products` takes them.
TILES = (
    WideTiles(128, 256, 64, 8, 3, 1.0),
    WideTiles(128, 128, 64, 8, 4, 0.8),
    WideTiles(64, 288, 64, 4, 4, 0.9, persistent=False),
    WideTiles(64, 256, 64, 4, 5, 0.86, persistent=False),
    WideTiles(64, 192, 64, 4, 6, 0.71, persistent=False),
    WideTiles(64, 192, 64, 4, 3, 0.425, persistent=False),
    WideTiles(64, 144, 64, 4, 5, 0.6, persistent=False),
    WideTiles(64, 128, 64, 4, 8, 0.61, persistent=False),
    WideTiles(64, 64, 128, 4, 6, 0.44, persistent=False),
    WideTiles(64, 32, 128, 4, 8, 0.26, persistent=False),
)
"""Widths between the powers of two are for weights of which those leave many multiprocessors idle in the last round;
144 and 288 divide 576. In a persistent loop the two parts took twice the time."""
CROWDING = 0.53
"""Share of a round's time that grows with the number of tiles: programs read through one cache."""
START = 700
"""Steps along K in the time that a program takes to fill its stages and to store its tile. A persistent one does both
beside the products of other tiles, but for its first."""
SHARED_BYTES = 227 << 10
"""Bytes of shared memory of a multiprocessor that one program may have."""
RESERVED_BYTES = 1 << 10
"""Beside those, of each program."""
GROUP = 8
"""Tiles of rows that follow one another over the same weights, which stay in the second-level cache."""
TEAM_TILES = (
    TeamTiles(2, 64, 256, 4),
    TeamTiles(2, 128, 128, 4, chunk=32),
    TeamTiles(2, 128, 192, 3, chunk=32),
    TeamTiles(2, 64, 192, 5, chunk=32),
    TeamTiles(2, 64, 288, 4, chunk=32),
    TeamTiles(2, 128, 144, 3, chunk=32),
    TeamTiles(2, 64, 128, 6),
    TeamTiles(2, 64, 144, 6, chunk=32),
    TeamTiles(2, 64, 96, 7, chunk=32),
    TeamTiles(2, 64, 64, 8),
    TeamTiles(1, 64, 256, 5),
    TeamTiles(1, 64, 192, 6),
    TeamTiles(1, 64, 144, 8, chunk=32),
    TeamTiles(1, 64, 128, 9, chunk=32),
    TeamTiles(1, 64, 96, 9, chunk=32),
    TeamTiles(1, 64, 64, 12),
)


def fitting_tiles(dtype: torch.dtype) -> tuple[WideTiles, ...]:
    """Those whose stages and product fit into shared memory."""
    return tuple(tiles for tiles in TILES if tiles.shared_bytes(dtype.itemsize) <= SHARED_BYTES)


def choose_wide(m: int, n: int, k: int, dtype: torch.dtype, num_multiprocessors: int) -> WideTiles:
    """The tiles that take the least time for [m, k] x [n, k]."""
    return min(fitting_tiles(dtype), key=lambda tiles: tiles.time(m, n, k, dtype.itemsize, num_multiprocessors))


@triton.jit
def place(i_tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of a tile."""
    num_m, num_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    in_group = GROUP * num_n
    first_m = i_tile // in_group * GROUP
    rows = tl.minimum(num_m - first_m, GROUP)
    return (first_m + i_tile % in_group % rows) * BLOCK_M, i_tile % in_group // rows * BLOCK_N
