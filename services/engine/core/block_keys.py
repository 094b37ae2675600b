"""Keys that seal records of blocks, on their way from the server to its core, which thereby needs
no token of the cluster."""

from __future__ import annotations

import os

from headwater.engine_core.kv.block_record import BlockSeal

from ...runtime import cluster_key
from ...runtime.cluster_key import Purpose

KEY_LEN = 32


def offer_block_keys() -> int:
    """A descriptor to be inherited, from which the keys of the current scope are read once; none
    without a cluster key."""
    reading, writing = os.pipe()
    with open(writing, "wb") as pipe:
        if (key := cluster_key.current()) is not None:
            pipe.write(b"".join(key.keys(Purpose.BLOCK)))
    return reading


def read_block_seal(descriptor: int) -> BlockSeal:
    """Seal by the keys that the server offered. Closes the descriptor."""
    with open(descriptor, "rb") as pipe:
        offered = pipe.read()
    return BlockSeal([offered[at : at + KEY_LEN] for at in range(0, len(offered), KEY_LEN)])
