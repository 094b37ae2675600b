"""The operations of sampling that a platform offers, each on whole rows of logits;
`platforms.specification` has their twins. Edits of logits (`edits.RequestEdits`) are no operation
of a platform: they are a compiled kernel on a CPU, and torch on other devices."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.sample import Draws
from headwater.kernels.sampling.vocabulary_slice import JoinedSlice


class SamplingOperations(Protocol):
    """Operations for R rows and V tokens. Logits are float32 or of the weights' dtype; tokens are
    int32 [R], on the device."""

    def draw(
        self, logits: torch.Tensor, draws: Draws, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Draws the token with the highest logit, or, where the temperature is above 0, of logit /
        temperature + noise; under masks int32 [R, words] where they are given."""

    def draw_filtered(self, logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
        """Like `draw` under top-k, top-p and min-p; logits are float32, every temperature is above
        0."""

    def mask_tokens(self, logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """Masked logits float32 [R, V]: minus infinity where a token's bit is not set, at least
        `token_mask.LOWEST` elsewhere."""

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities float32 [R] of token_ids int32 [R]; ids int32 and log probabilities
        float32 [R, num_top] of the likeliest."""


@runtime_checkable
class PartSampling(Protocol):
    """Draws from logits of some tokens of a vocabulary, which a platform may offer beside
    `SamplingOperations`. Ranks call the same methods with the same rows; what `JoinedSlice` joins
    is the same for all of them."""

    def draw_part(
        self,
        logits: torch.Tensor,
        draws: Draws,
        first_token: int,
        masks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that `draw` would choose among first_token … first_token + N − 1, whose logits [R,
        N] and masks are given: int32 [R], from 0 on, and their scores float32 [R]; minus infinity
        where a mask leaves none of them."""

    def draw_filtered_part(
        self, logits: torch.Tensor, draws: Draws, filters: Filters, part: JoinedSlice
    ) -> torch.Tensor:
        """The token that `draw_filtered` would draw from the logits of all ranks, on each of them;
        logits [R, N] are those of the slice."""

    def logprobs_part(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, part: JoinedSlice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes on each rank, to the bit, what `logprobs` computes from the logits of all
        ranks."""
