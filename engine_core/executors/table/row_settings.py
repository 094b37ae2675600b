"""Settings of rows of the request table for their logits: packed edits, and how many log
probabilities."""

from __future__ import annotations

import numpy as np
import torch

from headwater.kernels.launch.device import upload
from headwater.kernels.sampling.edit_logits import edit_logits

from ...executor import AdmittedRow, Int32Array
from ...sampling.edits import edits_of

_NO_SETTINGS = (0, 0, -1, 0)
"""Words of a row on the device: the address of its packed edits (two; 0: none), the number of its
log probabilities, unused."""


class RowSettings:
    """Settings of rows. They are sent to the device when a request is admitted, so that steps need
    not send them. A request with defaults sends nothing, unless the row's last request did not have
    defaults."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # The last row is for padding, whose index is -1.
        self._words = torch.tensor(
            [_NO_SETTINGS] * (num_rows + 1), dtype=torch.int32, device=device
        )
        self._sent = [_NO_SETTINGS] * num_rows
        self._packed: dict[int, torch.Tensor] = {}
        """Keyed by row. Memory that is given back is written no earlier than launches before have
        read it."""
        self.is_edited = np.zeros(num_rows, np.bool_)
        self.num_logprobs: Int32Array = np.full(num_rows, -1, np.int32)
        """[rows] beside the chosen token; -1: none are wanted."""

    def admit(self, admitted: AdmittedRow) -> None:
        row = admitted.row
        edits = edits_of(admitted)
        num_logprobs = admitted.sampling.num_logprobs
        self.is_edited[row] = edits is not None
        self.num_logprobs[row] = -1 if num_logprobs is None else num_logprobs
        self._packed.pop(row, None)
        address = 0
        if edits is not None:
            self._packed[row] = upload(edits.packed(self._vocab_size), self._device)
            address = self._packed[row].data_ptr()
        low, high = np.array([address], np.int64).view(np.int32).tolist()
        settings = (low, high, int(self.num_logprobs[row]), 0)
        if settings != self._sent[row]:
            self._sent[row] = settings
            self._words[row].copy_(
                upload(np.array(settings, np.int32), self._device), non_blocking=True
            )

    def edit(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        output_indices: torch.Tensor,
        token_table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `edit_logits`. Launches only."""
        addresses = self._words.view(torch.int64)
        edit_logits(logits, rows, positions, output_indices, token_table, addresses, out)

    def num_logprobs_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Number of log probabilities of rows int32 [S] on the device. Launches only."""
        return self._words[:, 2][rows]
