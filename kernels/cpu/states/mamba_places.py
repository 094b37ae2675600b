"""Indices of the arguments of Mamba-2's kernel, after those of `rows`."""

from __future__ import annotations

from . import rows

PARTS = rows.OWN
PARTS_STRIDE = rows.OWN + 1
OUT = rows.OWN + 2
TAPS = rows.OWN + 3
BIAS = rows.OWN + 4
RATES = rows.OWN + 5
STEP_BIASES = rows.OWN + 6
SKIPS = rows.OWN + 7
NUM_HEADS = rows.OWN + 8
HEAD_DIM = rows.OWN + 9
STATE_DIM = rows.OWN + 10
WIDTH = rows.OWN + 11
BLOCK_SIZE = rows.OWN + 12
DECAYS_AT = rows.OWN + 13
KEYS_AT = rows.OWN + 14
VALUES_AT = rows.OWN + 15
NUM_GROUPS = rows.OWN + 16
COLUMNS = rows.OWN + 17
