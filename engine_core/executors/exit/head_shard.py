"""Draws where each rank has the logits of some tokens. Of a plain draw none of them travels, but a
token and its score a row; of filtered draws and log probabilities the likeliest, and a few numbers.
Every rank takes the best of all, so the tokens are the same on each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from headwater.kernels.sampling.filtered_sample import Filters, filtered_sample
from headwater.kernels.sampling.lm_head_sample import MAX_ROWS, best_of_head
from headwater.kernels.sampling.sample import Candidates, Draws, best_of_stretches
from headwater.kernels.sampling.vocabulary_slice import VocabularySlice

from ...layers.linear.dense import DenseLinear
from ...layers.linear.linear import Linear, Product
from ...platforms.peer_group import PeerGroup
from ...weights.shards import Shard


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The rows of a vocabulary head that one rank has, or of several heads over one vocabulary."""

    linear: Linear
    product: Product
    shard: Shard
    vocab_size: int
    group: PeerGroup

    def draw(
        self, hidden: torch.Tensor, draws: Draws, candidates: Candidates, out: torch.Tensor
    ) -> None:
        """Draws from hidden [R, H] as all ranks do; writes out int32 [R], the same on each."""
        if len(hidden) <= MAX_ROWS and isinstance(self.linear, DenseLinear):
            num_stretches = best_of_head(
                hidden, self.linear.weight, draws, candidates, self._first_token
            )
            self.group.best(candidates, num_stretches, out)
        else:
            self.draw_from(self.product(hidden), draws, candidates, out)

    def draw_from(
        self, logits: torch.Tensor, draws: Draws, candidates: Candidates, out: torch.Tensor
    ) -> None:
        """As `draw`, from logits [R, N] of this rank's tokens."""
        num_stretches = best_of_stretches(logits, draws, candidates, self._first_token)
        self.group.best(candidates, num_stretches, out)

    def draw_filtered(
        self, logits: torch.Tensor, draws: Draws, filters: Filters, out: torch.Tensor
    ) -> None:
        """Draws rows with a filter from logits [R, N] of this rank's tokens; see
        `filtered_sample`."""
        filtered_sample(logits, draws, filters, out, self.tokens)

    def masks(self, masks: torch.Tensor) -> torch.Tensor:
        """The words of masks int32 [R, words] for this rank's tokens, which begin at a whole
        one."""
        return masks[:, self.tokens.first_token // 32 :]

    @property
    def tokens(self) -> VocabularySlice:
        """The tokens whose logits this rank computes."""
        return self.group.slice_of(self._first_token, self.vocab_size)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of all tokens, the same on each rank, from those of its own or of all."""
        if logits.shape[1] == self.vocab_size:
            return logits
        width = len(Shard(0, self.shard.size).vocabulary(self.vocab_size))
        return self.group.join(pad(logits, (0, width - logits.shape[1])))[:, : self.vocab_size]

    @property
    def _first_token(self) -> int:
        return self.shard.vocabulary(self.vocab_size).start
