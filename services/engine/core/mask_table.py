"""The masks of a core's rows, in memory that the server writes and the core reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwater.engine_core.system.ring import anonymous_memory, map_at_least

Int32Array = npt.NDArray[np.int32]


def create_mask_memory() -> int:
    """A file descriptor to be inherited; the first process that maps the memory gives it its
    size."""
    return anonymous_memory("headwater-masks", 0)


def map_masks(memory: int, num_positions: int, num_rows: int, vocab_size: int) -> Int32Array:
    """int32 [num_positions, num_rows, words], a mask for each position of a row: its next output,
    and the one after each of its drafts. Bit i of word w stands for token 32 w + i. What is not
    written costs nothing, unless a GPU reads the table: it is pinned as a whole then."""
    num_words = -(-vocab_size // 32)
    num_bytes = 4 * num_positions * num_rows * num_words
    return np.frombuffer(map_at_least(memory, num_bytes), np.int32).reshape(
        num_positions, num_rows, num_words
    )
