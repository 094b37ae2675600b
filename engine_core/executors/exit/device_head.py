"""Vocabulary heads on a GPU, and draws from their logits: of a whole head, or of the rows that one
rank has.

Where ranks divide a head they exchange no logits: for a plain draw one token and its score a row,
for filtered draws and log probabilities the likeliest tokens and a few numbers. Every rank takes
the best token of all ranks, so all have the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad

from headwater.kernels.sampling.filtered_sample import Filters, filtered_sample
from headwater.kernels.sampling.lm_head_sample import MAX_ROWS, best_of_head, lm_head_sample
from headwater.kernels.sampling.logprobs import MOST_TOPS
from headwater.kernels.sampling.sample import Candidates, Draws, best_of_stretches, sample
from headwater.kernels.sampling.vocabulary_slice import VocabularySlice

from ...layers.linear.dense import DenseLinear
from ...layers.linear.linear import Linear, Product
from ...layers.lm_head import LMHead
from ...platforms.peer_group import PeerGroup
from ...weights.shards import Shard


class Logits(Protocol):
    """Computes and samples logits [R, N] of the whole vocabulary, or of one rank's part of it."""

    @property
    def masks_first(self) -> bool:
        """Whether masks are applied to logits before a draw, which otherwise reads them itself."""

    @property
    def tokens(self) -> VocabularySlice | None:
        """The tokens that the logits are of; None: all."""

    def masks(self, masks: torch.Tensor) -> torch.Tensor:
        """The words of masks int32 [R, words] for these tokens."""

    def draw_from(
        self,
        logits: torch.Tensor,
        draws: Draws,
        candidates: Candidates,
        out: torch.Tensor,
        masks: torch.Tensor | None = None,
    ) -> None:
        """Writes out int32 [R], the same on all ranks."""

    def draw_filtered(
        self, logits: torch.Tensor, draws: Draws, filters: Filters, out: torch.Tensor
    ) -> None:
        """Draws the rows with a filter; see `filtered_sample`."""


class DeviceHead(Protocol):
    """A vocabulary head, whole or the rows that one rank has."""

    @property
    def lm_head(self) -> LMHead:
        """Makes the logits of all tokens, on each rank."""

    def draw(
        self, hidden: torch.Tensor, draws: Draws, candidates: Candidates, out: torch.Tensor
    ) -> None:
        """Draws from hidden [R, H]; writes out int32 [R], the same on all ranks."""

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] → logits [R, N] of the tokens that this rank has."""

    def logits_of(self, logits: torch.Tensor) -> Logits:
        """How logits [R, V], or [R, N] of the tokens that this rank has, are drawn from."""

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of the whole vocabulary, gathered from all ranks where each has a part."""

    def scored(self, hidden: torch.Tensor, num_top: int) -> tuple[torch.Tensor, Logits]:
        """Logits of hidden [R, H] from which so many of the likeliest tokens can be found."""


class WholeLogits:
    """See `Logits`: logits of the whole vocabulary."""

    masks_first = False
    tokens = None

    def masks(self, masks: torch.Tensor) -> torch.Tensor:
        return masks

    def draw_from(
        self,
        logits: torch.Tensor,
        draws: Draws,
        candidates: Candidates,
        out: torch.Tensor,
        masks: torch.Tensor | None = None,
    ) -> None:
        sample(logits, draws, candidates, out, masks)

    def draw_filtered(
        self, logits: torch.Tensor, draws: Draws, filters: Filters, out: torch.Tensor
    ) -> None:
        filtered_sample(logits, draws, filters, out)


WHOLE_LOGITS = WholeLogits()


@dataclass(frozen=True, slots=True)
class WholeHead:
    """See `DeviceHead`."""

    lm_head: LMHead

    def draw(
        self, hidden: torch.Tensor, draws: Draws, candidates: Candidates, out: torch.Tensor
    ) -> None:
        linear = self.lm_head.linear
        if len(hidden) <= MAX_ROWS and isinstance(linear, DenseLinear):
            # One launch makes logits and samples.
            lm_head_sample(hidden, linear.weight, draws, candidates, out)
        else:
            sample(self.lm_head(hidden), draws, candidates, out)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def logits_of(self, logits: torch.Tensor) -> Logits:
        return WHOLE_LOGITS

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def scored(self, hidden: torch.Tensor, num_top: int) -> tuple[torch.Tensor, Logits]:
        return self.lm_head(hidden), WHOLE_LOGITS


@dataclass(frozen=True, slots=True)
class HeadShard:
    """See `DeviceHead` and `Logits`: the rows of a vocabulary head that one rank has, or of several
    heads over one vocabulary."""

    lm_head: LMHead
    linear: Linear
    own_product: Product
    """Product of `linear`."""
    shard: Shard
    vocab_size: int
    group: PeerGroup
    masks_first = True

    def draw(
        self, hidden: torch.Tensor, draws: Draws, candidates: Candidates, out: torch.Tensor
    ) -> None:
        if len(hidden) <= MAX_ROWS and isinstance(self.linear, DenseLinear):
            num_stretches = best_of_head(
                hidden, self.linear.weight, draws, candidates, self._first_token
            )
            self.group.best(candidates, num_stretches, out)
        else:
            self.draw_from(self.product(hidden), draws, candidates, out)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.own_product(hidden)

    def logits_of(self, logits: torch.Tensor) -> Logits:
        return self if logits.shape[1] < self.vocab_size else WHOLE_LOGITS

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[1] == self.vocab_size:
            return logits
        width = len(Shard(0, self.shard.size).vocabulary(self.vocab_size))
        return self.group.join(pad(logits, (0, width - logits.shape[1])))[:, : self.vocab_size]

    def scored(self, hidden: torch.Tensor, num_top: int) -> tuple[torch.Tensor, Logits]:
        if num_top > MOST_TOPS.value:
            return self.lm_head(hidden), WHOLE_LOGITS
        return self.product(hidden), self

    def draw_from(
        self,
        logits: torch.Tensor,
        draws: Draws,
        candidates: Candidates,
        out: torch.Tensor,
        masks: torch.Tensor | None = None,
    ) -> None:
        assert masks is None, "masks come first"
        num_stretches = best_of_stretches(logits, draws, candidates, self._first_token)
        self.group.best(candidates, num_stretches, out)

    def draw_filtered(
        self, logits: torch.Tensor, draws: Draws, filters: Filters, out: torch.Tensor
    ) -> None:
        filtered_sample(logits, draws, filters, out, self.tokens)

    def masks(self, masks: torch.Tensor) -> torch.Tensor:
        """Masks of the rank's part of the vocabulary, which begins at a whole word."""
        return masks[:, self.tokens.first_token // 32 :]

    @property
    def tokens(self) -> VocabularySlice:
        return self.group.slice_of(self._first_token, self.vocab_size)

    @property
    def _first_token(self) -> int:
        return self.shard.vocabulary(self.vocab_size).start
