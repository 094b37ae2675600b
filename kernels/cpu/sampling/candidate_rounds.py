"""Draws a token under top-k, top-p and min-p on a CPU from whole rows of logits, of which ranks may
have slices: in rounds, as `filter_rounds` does on a GPU."""

from __future__ import annotations

import torch

from ...sampling.filtered_sample import Filters
from ...sampling.ordered_floats import float_of, ordered
from ...sampling.sample import Draws
from ...sampling.vocabulary_slice import JoinedSlice
from ..row_weights import row_weights
from .draw import draw, scores_of

PARTS = 64
"""Number of parts of a range of floats: one exchange between ranks finds the part with the k-th
highest logit."""


def least_kept(highests: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
    """The least logits float32 [R] that min-p keeps, beside the highest ones float32 [R]."""
    exact = highests.double() + filters.min_ps.double().log() * draws.temperatures.double()
    rounded = exact.float()
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.double() < exact, above, rounded)


def draw_in_rounds(
    logits: torch.Tensor, highests: torch.Tensor, draws: Draws, filters: Filters, part: JoinedSlice
) -> torch.Tensor:
    """Draws from logits float32 [R, N], as `candidate_sample`; `highests` float32 [R] are those of
    all ranks.

    A round draws from the logits above a bound. The token stands if the filters keep its logit; if
    they do not, they keep no lower one, and the next round's bound lies there.
    """
    leasts = torch.maximum(
        least_kept(highests, draws, filters), _cuts(logits, highests, filters.top_ks, part)
    )
    _, masses = _above(logits, highests, draws.temperatures, leasts, part)
    wanted = torch.where(filters.top_ps < 1, filters.top_ps.double() * masses.double(), torch.inf)
    tokens = torch.zeros(len(logits), dtype=torch.int32)
    left = torch.arange(len(logits))
    pivots = torch.full_like(highests, -torch.inf)
    while len(left):
        x = logits[left]
        some = draws.select(left)
        least = leasts[left]
        is_left = (x >= least[:, None]) & (x > pivots[left, None])
        tokens[left], drawn = _best(x.masked_fill(~is_left, -torch.inf), some, part)
        bounds = torch.maximum(least, torch.nextafter(drawn, torch.full_like(drawn, torch.inf)))
        num_above, mass_above = _above(x, highests[left], some.temperatures, bounds, part)
        pivots[left] = drawn
        left = left[(mass_above.double() >= wanted[left]) & (num_above > 0)]
    return tokens


def _above(
    logits: torch.Tensor,
    highests: torch.Tensor,
    temperatures: torch.Tensor,
    leasts: torch.Tensor,
    part: JoinedSlice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many logits of all ranks are at least `leasts` float32 [R], and their whole weights;
    int64 [R] each."""
    counts = (logits >= leasts[:, None]).sum(1)
    weights = row_weights(logits, highests, temperatures, leasts)
    found, total = part.total(torch.stack((counts, weights), dim=1)).unbind(1)
    return found, total


def _best(
    logits: torch.Tensor, draws: Draws, part: JoinedSlice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens int32 [R] that plain draws choose, and their logits."""
    own = draw(logits, draws, first_token=part.first_token)
    scores = scores_of(logits, own, draws, first_token=part.first_token)
    chosen = logits.gather(1, own[:, None].long())[:, 0]
    drawn_here = torch.stack((scores, chosen, (own + part.first_token).view(torch.float32)), dim=1)
    of_ranks = part.join(drawn_here).view(len(drawn_here), -1, 3)
    # The first of equal scores counts, which has the smaller token.
    best = of_ranks[:, :, 0].argmax(1)
    rows = of_ranks[torch.arange(len(drawn_here)), best]
    return rows[:, 2].contiguous().view(torch.int32), rows[:, 1].contiguous()


def _cuts(
    logits: torch.Tensor, highests: torch.Tensor, top_ks: torch.Tensor, part: JoinedSlice
) -> torch.Tensor:
    """The k-th highest logit float32 [R] of each row; minus infinity without top-k. Divides the
    range of floats, whose bits are ordered as whole numbers, into `PARTS` again and again."""
    if not (top_ks > 0).any():
        return torch.full_like(highests, -torch.inf)
    own = logits.sort(dim=1).values
    at = torch.arange(1, PARTS)
    low = ordered(torch.full_like(highests, -torch.inf))
    high = ordered(highests)
    # As many rounds for all rows, so that each rank comes to the same number of exchanges.
    while (low < high).any():
        step = (high - low) // PARTS + 1
        bounds = torch.minimum(low[:, None] + step[:, None] * at, high[:, None])
        below = torch.searchsorted(own, float_of(bounds), out_int32=True)
        reached = part.total(logits.shape[1] - below) >= top_ks[:, None]
        # Bounds ascend: bounds that k logits reach come first.
        count = reached.sum(1)
        beyond = torch.cat((bounds, high[:, None] + 1), dim=1).gather(1, count[:, None])[:, 0]
        low = torch.where(
            count > 0, torch.cat((low[:, None], bounds), dim=1).gather(1, count[:, None])[:, 0], low
        )
        high = torch.minimum(high, beyond - 1)
    return torch.where(top_ks > 0, float_of(low), -torch.inf)
