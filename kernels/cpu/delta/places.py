"""Indices of the arguments of a gated delta net's kernel, after those of `rows`."""

from __future__ import annotations

from ..compiler.simd_types import NUM_LANES
from ..states import rows

WIDTH = 2 * NUM_LANES
"""Heads have a multiple of so many numbers."""
WIDE = rows.OWN
WIDE_STRIDE = rows.OWN + 1
NARROW = rows.OWN + 2
NARROW_STRIDE = rows.OWN + 3
TAPS = rows.OWN + 4
RATES = rows.OWN + 5
BIASES = rows.OWN + 6
NORM = rows.OWN + 7
EPS = rows.OWN + 8
OUT = rows.OWN + 9
NUM_VALUES = rows.OWN + 10
KEY_DIM = rows.OWN + 11
VALUE_DIM = rows.OWN + 12
BLOCK_SIZE = rows.OWN + 13
GATES_AT = rows.OWN + 14
KEYS_AT = rows.OWN + 15
VALUES_AT = rows.OWN + 16
COLUMNS = rows.OWN + 17
QUERY = rows.OWN + 18
QUERY_STRIDE = rows.OWN + 19
KEY = rows.OWN + 20
KEY_STRIDE = rows.OWN + 21
VALUE = rows.OWN + 22
VALUE_STRIDE = rows.OWN + 23
Z = rows.OWN + 24
Z_STRIDE = rows.OWN + 25
DECAY = rows.OWN + 26
DECAY_STRIDE = rows.OWN + 27
SHARE = rows.OWN + 28
SHARE_STRIDE = rows.OWN + 29
SCALE = rows.OWN + 30
SCRATCH = rows.OWN + 31
