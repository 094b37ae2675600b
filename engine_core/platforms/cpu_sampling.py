"""Sampling on a CPU: kernels compiled by numba, and torch."""

from __future__ import annotations

import torch

from headwater.kernels.cpu.sampling.candidate_sample import candidate_sample
from headwater.kernels.cpu.sampling.draw import draw as draw_tokens
from headwater.kernels.cpu.sampling.draw import scores_of
from headwater.kernels.cpu.sampling.joined_logprobs import joined_logprobs
from headwater.kernels.sampling.sample import Draws
from headwater.kernels.sampling.token_mask import mask_tokens_twin


class CpuSampling:
    """See `SamplingOperations` and `PartSampling`."""

    draw = staticmethod(draw_tokens)
    draw_filtered = draw_filtered_part = staticmethod(candidate_sample)
    mask_tokens = staticmethod(mask_tokens_twin)
    logprobs = logprobs_part = staticmethod(joined_logprobs)

    def draw_part(
        self,
        logits: torch.Tensor,
        draws: Draws,
        first_token: int,
        masks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = draw_tokens(logits, draws, masks, first_token=first_token)
        return tokens, scores_of(logits, tokens, draws, masks, first_token=first_token)
