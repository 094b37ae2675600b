"""Sampling from logits of which each tensor-parallel rank has those of some tokens; see
`SamplingOperations`.

Plain draws gather one score and one token of each rank and row; draws under filters some
candidates, and what a rank's tokens weigh; log probabilities the likeliest tokens, and that weight.
Rows whose logits are edited need the logits of all tokens, which are gathered for them alone.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.sample import Draws
from headwater.kernels.sampling.vocabulary_slice import JoinedSlice

from ..sampling.operations import PartSampling, SamplingOperations
from ..weights.shards import Shard
from .process_group import Group


class ShardedSampling:
    """See `SamplingOperations`. Logits may be whole as well: then nothing is gathered."""

    def __init__(
        self,
        operations: SamplingOperations,
        parts: PartSampling | None,
        shard: Shard,
        vocab_size: int,
        group: Group,
    ) -> None:
        """`parts`: draws from logits of some tokens; None: the platform has none, so that every
        draw gathers all."""
        self._operations = operations
        self._parts = parts
        self._group = group
        self._vocab_size = vocab_size
        self._token_ids = shard.vocabulary(vocab_size)
        self._width = len(Shard(0, shard.size).vocabulary(vocab_size))
        self._slice = JoinedSlice(
            first_token=self._token_ids.start, vocab_size=vocab_size, join=group.join
        )

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of all tokens."""
        if logits.shape[1] == self._vocab_size:
            return logits
        return self._group.join(pad(logits, (0, self._width - logits.shape[1])))[
            :, : self._vocab_size
        ].contiguous()

    def draw(
        self, logits: torch.Tensor, draws: Draws, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._parts is None or self._slice.is_whole(logits):
            return self._operations.draw(self.whole(logits), draws, masks)
        first = self._token_ids.start
        tokens, scores = self._parts.draw_part(
            logits, draws, first, None if masks is None else self._own(masks)
        )
        # Each rank sends score and token in one message: the token's bits are stored as a float's.
        drawn = torch.stack((scores, (tokens + first).int().view(torch.float32)), dim=1)
        of_ranks = self._group.join(drawn).view(len(drawn), -1, 2)
        # The first of equal scores counts, which has the smaller token.
        best = of_ranks[:, :, 0].argmax(1, keepdim=True)
        return of_ranks[:, :, 1].gather(1, best)[:, 0].contiguous().view(torch.int32)

    def draw_filtered(self, logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
        if self._parts is None or self._slice.is_whole(logits):
            return self._operations.draw_filtered(self.whole(logits), draws, filters)
        return self._parts.draw_filtered_part(logits, draws, filters, self._slice)

    def mask_tokens(self, logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """Masks the rank's own tokens where the logits are of those alone."""
        if self._slice.is_whole(logits):
            return self._operations.mask_tokens(logits, masks)
        return self._operations.mask_tokens(logits, self._own(masks))

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._parts is None or self._slice.is_whole(logits):
            return self._operations.logprobs(self.whole(logits), token_ids, num_top)
        return self._parts.logprobs_part(logits, token_ids, num_top, self._slice)

    def _own(self, masks: torch.Tensor) -> torch.Tensor:
        """The words of this rank's tokens, which begin at a whole one."""
        return masks[:, self._token_ids.start // 32 : -(-self._token_ids.stop // 32)]
