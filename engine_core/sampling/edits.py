"""Edits logits as a request's sampling contract asks. Knows nothing about rows and steps."""

from __future__ import annotations

import torch

from headwater.kernels.cpu.sampling.edit_logits import edit_row
from headwater.kernels.sampling.edit_logits import Edits, edit_twin

from ..executor import AdmittedRow, Int32Array


class RequestEdits:
    """Edits the logits of one request: on a CPU by a compiled kernel, on other devices in plain
    torch."""

    def __init__(self, edits: Edits) -> None:
        self._edits = edits
        self._packed: Int32Array | None = None

    def apply(self, logits: torch.Tensor, output_index: int, output_ids: Int32Array) -> None:
        """Edits logits float32 [P, V], contiguous, in place: of P positions, each behind one more
        token. output_index is the first one's; output_ids [n] are the outputs, and drafts, before
        the last one."""
        if logits.is_cpu:
            if self._packed is None:
                self._packed = self._edits.packed(logits.shape[1])
            edit_row(logits, self._packed, output_index, output_ids)
            return
        known = torch.from_numpy(output_ids).to(logits.device)
        for j, row in enumerate(logits):
            edit_twin(row, self._edits, output_index + j, known[: len(known) - len(logits) + 1 + j])


def edits_of(admitted: AdmittedRow) -> Edits | None:
    """Edits of a request; None: its tokens are drawn from the logits as they are."""
    params = admitted.sampling
    blocked_ids = params.min_tokens_blocked_ids if params.min_tokens else ()
    lists = params.allowed_token_ids, params.bad_words, params.logit_bias, blocked_ids
    if not (any(lists) or params.has_penalties):
        return None
    return Edits(
        prompt_ids=admitted.token_ids[: admitted.num_prompt_tokens],
        allowed_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        min_tokens=params.min_tokens,
        blocked_ids=blocked_ids,
        biases=params.logit_bias,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )
