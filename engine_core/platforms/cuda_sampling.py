"""Sampling on an NVIDIA GPU, a launch or two an operation: the kernels that `DeviceSampler`
launches in its graphs."""

from __future__ import annotations

import torch

from headwater.kernels.sampling.filtered_sample import Filters, filtered_sample
from headwater.kernels.sampling.logprobs import logprobs_of
from headwater.kernels.sampling.sample import Candidates, Draws, sample
from headwater.kernels.sampling.token_mask import mask_tokens


class CudaSampling:
    """See `SamplingOperations`."""

    def draw(
        self, logits: torch.Tensor, draws: Draws, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = logits if masks is None else self.mask_tokens(logits, masks)
        tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        sample(
            logits,
            draws,
            Candidates.allocate(logits.shape[0], logits.shape[1], logits.device),
            tokens,
        )
        return tokens

    def draw_filtered(self, logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
        tokens = self.draw(logits, draws)
        filtered_sample(logits, draws, filters, tokens)
        return tokens

    def mask_tokens(self, logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        masked = torch.empty_like(logits, dtype=torch.float32)
        mask_tokens(logits, masks, masked)
        return masked

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return logprobs_of(logits, token_ids, num_top)
