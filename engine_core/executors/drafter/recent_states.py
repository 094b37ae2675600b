"""The last hidden states of each row of a request table, by position."""

from __future__ import annotations

import numpy as np
import torch

from ...executor import Int32Array
from ...ragged import last_elements, places


class RecentStates:
    """A ring of `width` positions a row."""

    def __init__(
        self, num_rows: int, width: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._width = width
        self._states = torch.zeros(num_rows, width, size, dtype=dtype, device=device)

    def put(
        self, rows: Int32Array, starts: Int32Array, counts: Int32Array, states: torch.Tensor
    ) -> None:
        """states [sum of counts, size] of positions starts[i] … starts[i] + counts[i] − 1 of
        rows[i]."""
        num_kept = np.minimum(counts, self._width)
        positions = np.repeat(starts + counts - num_kept, num_kept) + places(num_kept)
        kept = states
        if (num_kept < counts).any():
            kept = states[torch.from_numpy(last_elements(counts, num_kept)).to(states.device)]
        self._states[self._at(np.repeat(rows, num_kept), positions)] = kept

    def get(self, rows: Int32Array, positions: Int32Array) -> torch.Tensor:
        """[N, size] of one position each; zeros of a row or a place in the ring that has had
        none."""
        return self._states[self._at(rows, positions)]

    def _at(self, rows: Int32Array, positions: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._states.device
        found = torch.from_numpy(rows).long(), torch.from_numpy(positions % self._width).long()
        return found[0].to(device), found[1].to(device)
