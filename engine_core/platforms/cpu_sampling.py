"""Sampling on a CPU: kernels compiled by numba, and torch."""

from __future__ import annotations

import torch

from headwater.kernels.candidate_sample import candidate_sample
from headwater.kernels.cpu.draw import draw, scores_of
from headwater.kernels.filtered_sample import Filters
from headwater.kernels.joined_logprobs import joined_logprobs
from headwater.kernels.sample import Draws
from headwater.kernels.token_mask import mask_tokens_twin
from headwater.kernels.vocabulary_slice import JoinedSlice


class CpuSampling:
    """See `SamplingOperations`."""

    def draw(self, logits: torch.Tensor, draws: Draws, masks: torch.Tensor | None = None) -> torch.Tensor:
        return draw(logits, draws, masks)

    def draw_part(
        self, logits: torch.Tensor, draws: Draws, first_token: int, masks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PartSampling`."""
        tokens = draw(logits, draws, masks, first_token=first_token)
        return tokens, scores_of(logits, tokens, draws, masks, first_token=first_token)

    def draw_filtered(self, logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
        return candidate_sample(logits, draws, filters)

    def draw_filtered_part(
        self, logits: torch.Tensor, draws: Draws, filters: Filters, part: JoinedSlice
    ) -> torch.Tensor:
        """See `PartSampling`."""
        return candidate_sample(logits, draws, filters, part)

    def mask_tokens(self, logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        return mask_tokens_twin(logits, masks)

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return joined_logprobs(logits, token_ids, num_top)

    def logprobs_part(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, part: JoinedSlice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `PartSampling`."""
        return joined_logprobs(logits, token_ids, num_top, part)
