"""What the host reads of tokens that rows gained on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from headwater.engine_core.executors.entry.device_rows import DeviceGains
from headwater.engine_core.sampling.verification import NO_TOKEN


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_tokens_of_all_positions_are_sorted_by_row() -> None:
    packed = torch.tensor([2 + 256 * 3, 99, 1], dtype=torch.int32)
    gains = DeviceGains(packed, np.array([True, False, True]), ints(4, 1))
    token_ids, num_tokens, num_drafts = gains.read(ints(10, 11, 12, 13, 20))
    assert token_ids.tolist() == [[10, 11, 12, 13], [20, NO_TOKEN, NO_TOKEN, NO_TOKEN]]
    assert (num_tokens.tolist(), num_drafts.tolist()) == ([2, 1], [3, 0])


def test_a_step_that_samples_for_no_row_gains_nothing() -> None:
    gains = DeviceGains(torch.zeros(2, dtype=torch.int32), np.zeros(2, np.bool_), ints())
    token_ids, num_tokens, num_drafts = gains.read(ints())
    assert (len(token_ids), len(num_tokens), len(num_drafts)) == (0, 0, 0)
