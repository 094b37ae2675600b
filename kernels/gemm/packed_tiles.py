"""Tiles of the products of packed weights on Hopper: shapes, and which serve how many rows. Knows
nothing about multiplying."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_N = 64
"""Outputs of a team: the rows that the matrix unit takes from four warps. A team may also have half
as many: each warp then unpacks half of the weights, and zeros are in place of the others."""


@dataclass(frozen=True, slots=True)
class RingTiles:
    block_m: int
    """Number of rows of x in a tile, a multiple of 8."""
    num_tiles: int
    """Tiles of weights in a stage."""
    num_stages: int
    registers: int | None = 128
    """Registers of a thread at the launch. With fewer, more programs share a multiprocessor. None:
    of two teams, whose warps share all out."""
    block_n: int = BLOCK_N
    """Outputs of a program: half a team's, a team's or those of two."""


# Keys are bits of a weight and the largest numbers of rows. Measured on an H200
# (docs/benchmarks.md, "Weights of few bits") for 1, 16 and 64 rows.
TILES = {
    (4, 8): RingTiles(8, 4, 6),
    (4, 16): RingTiles(16, 4, 5),
    (4, 32): RingTiles(32, 2, 8),
    (4, 64): RingTiles(64, 2, 5),
    (4, 128): RingTiles(128, 1, 6, 160),
    (8, 8): RingTiles(8, 8, 4),
    (8, 16): RingTiles(16, 8, 4),
    (8, 32): RingTiles(32, 4, 6),
    (8, 64): RingTiles(64, 4, 4),
    (8, 128): RingTiles(128, 2, 5, 160),
}
CROWDED_TILES = {
    (4, 8): RingTiles(8, 4, 2, 80),
    (4, 16): RingTiles(16, 4, 2, 80),
    (8, 8): RingTiles(8, 8, 2, 80),
}
"""Tiles where there are more programs than multiprocessors: two or three share one."""
NARROW_TILES = {
    (4, 8): RingTiles(8, 8, 4, block_n=BLOCK_N // 2),
    (4, 16): RingTiles(16, 8, 4, block_n=BLOCK_N // 2),
    (8, 8): RingTiles(8, 8, 5, block_n=BLOCK_N // 2),
}
"""Tiles where there are at most half as many programs as multiprocessors: each program is cut in
two. Their rings fill a multiprocessor, so that none gets two programs while others have none."""
LONE_TEAM = {4: RingTiles(256, 1, 3, 240), 8: RingTiles(256, 1, 6, 240)}
"""Tiles of a team without another for 129 to `MOST_ROWS_OF_ONE` rows, by bits of a weight."""
MOST_ROWS_OF_ONE = 512
WIDE_TILES = {
    4: {
        RingTiles(128, 1, 6, 160): 21.5,
        RingTiles(64, 2, 4, None, 2 * BLOCK_N): 22.5,
        RingTiles(128, 2, 2, None, 2 * BLOCK_N): 29.5,
        LONE_TEAM[4]: 31.0,
        RingTiles(256, 1, 3, None, 2 * BLOCK_N): 47.0,
    },
    8: {
        RingTiles(128, 2, 5, 160): 22.5,
        RingTiles(64, 4, 3, None, 2 * BLOCK_N): 25.5,
        RingTiles(128, 2, 4, None, 2 * BLOCK_N): 31.0,
        LONE_TEAM[8]: 35.0,
        RingTiles(256, 1, 5, None, 2 * BLOCK_N): 47.5,
    },
}
"""Tiles for more rows, by bits of a weight, and what a program of each takes for 4,096 inputs on an
H100, in µs (2026-11-26)."""
MOST_ROWS = 2048
"""Number of rows above which a matrix that is expanded first takes less time."""
LONG_INPUTS = 3072
"""Number of inputs from which on a program that is cut in two takes less time."""
MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or an H200."""
ONE_ROUND = MULTIPROCESSORS * BLOCK_N
"""Number of outputs for which each multiprocessor has one program."""


def choose(num_rows: int, num_outputs: int, num_inputs: int, bits: int) -> RingTiles | None:
    """The tiles for a product; None: a matrix that is expanded first takes less time."""
    most = next((rows for each, rows in TILES if each == bits and num_rows <= rows), None)
    if most is None:
        return _choose_wide(num_rows, num_outputs, bits) if num_rows <= MOST_ROWS else None
    if num_outputs <= ONE_ROUND // 2 and num_inputs >= LONG_INPUTS and (bits, most) in NARROW_TILES:
        return NARROW_TILES[bits, most]
    is_crowded = num_outputs > ONE_ROUND and (bits, most) in CROWDED_TILES
    return (CROWDED_TILES if is_crowded else TILES)[bits, most]


def _choose_wide(num_rows: int, num_outputs: int, bits: int) -> RingTiles:
    """The tiles whose rounds of programs, one to a multiprocessor, take the least time."""

    def time(tiles: RingTiles) -> float:
        num_programs = -(-num_outputs // tiles.block_n) * -(-num_rows // tiles.block_m)
        return -(-num_programs // MULTIPROCESSORS) * WIDE_TILES[bits][tiles]

    return min(WIDE_TILES[bits], key=time)


def tiles_of(bits: int) -> list[RingTiles]:
    """Tiles that serve weights of so many bits."""
    few = [
        tiles
        for each in (TILES, CROWDED_TILES, NARROW_TILES)
        for key, tiles in each.items()
        if key[0] == bits
    ]
    return [*few, *WIDE_TILES[bits]]
