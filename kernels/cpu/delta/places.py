"""Places of the arguments of a gated delta net's kernel, which `argument` reads."""

from __future__ import annotations

from ..compiler.simd_types import NUM_LANES

WIDTH = 2 * NUM_LANES
"""Heads have a multiple of so many numbers."""
WIDE = 0
WIDE_STRIDE = 1
NARROW = 2
NARROW_STRIDE = 3
TAPS = 4
RATES = 5
BIASES = 6
NORM = 7
EPS = 8
OUT = 9
PAGES = 10
PAGE_BYTES = 11
FIRST = 12
LAST = 13
NUM_PAGES = 14
STARTS = 15
TOKENS = 16
FIRST_UNIT = 17
UNITS_PER_PAGE = 18
UNIT_BYTES = 19
NUM_HEADS = 20
NUM_VALUES = 21
KEY_DIM = 22
VALUE_DIM = 23
BLOCK_SIZE = 24
INPUTS_AT = 25
GATES_AT = 26
KEYS_AT = 27
VALUES_AT = 28
QUERY = 29
QUERY_STRIDE = 30
KEY = 31
KEY_STRIDE = 32
VALUE = 33
VALUE_STRIDE = 34
Z = 35
Z_STRIDE = 36
DECAY = 37
DECAY_STRIDE = 38
SHARE = 39
SHARE_STRIDE = 40
SCALE = 41
ENDS = 42
SCRATCH = 43
