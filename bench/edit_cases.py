"""Edits of logits that benchmarks time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from headwater.kernels.sampling.edit_logits import Edits, edit_logits

NUM_BIASES = 300
NUM_BAD_WORDS = 50
PROMPT_LEN = 2000


def edit_call(logits: torch.Tensor, num_outputs: int) -> Callable[[], None]:
    """Launches penalties, biases and bad words for logits [P, V] of positions of one row, as for a
    row with drafts; `num_outputs` outputs stand before the last draft."""
    (num_positions, vocab_size), random = logits.shape, np.random.default_rng(0)
    num_outputs = max(num_outputs, num_positions)
    prompt_ids, outputs = (
        random.integers(0, vocab_size, n).astype(np.int32) for n in (PROMPT_LEN, num_outputs)
    )
    edits = Edits(
        prompt_ids=prompt_ids,
        bad_words=[outputs[i : i + 3].tolist() for i in range(NUM_BAD_WORDS)],
        biases=dict.fromkeys(range(0, vocab_size, vocab_size // NUM_BIASES), 1.0),
        repetition=1.1,
        presence=0.1,
        frequency=0.1,
    )
    device = logits.device
    packed = torch.from_numpy(edits.packed(vocab_size)).to(device)
    addresses = torch.tensor([[packed.data_ptr()]], device=device)
    table = torch.from_numpy(np.concatenate((prompt_ids, outputs, outputs[:1])))[None].to(device)
    indices = (
        torch.arange(num_positions, dtype=torch.int32, device=device)
        + num_outputs
        - num_positions
        + 1
    )
    rows = torch.zeros_like(indices)
    out = torch.empty_like(logits, dtype=torch.float32)
    return partial(
        _edit, packed, logits, rows, indices + PROMPT_LEN - 1, indices, table, addresses, out
    )


def _edit(packed: torch.Tensor, *given: torch.Tensor) -> None:
    """Launches the edits. `packed` keeps the memory alive that the addresses point to."""
    edit_logits(*given)
