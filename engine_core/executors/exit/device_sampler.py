"""Draws of tokens from hidden states on a GPU, in the order of `sampler`. A draw is a constant
number of launches, so that a graph can hold each way to draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headwater.kernels.rows.step_rows import load_draws
from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.logprobs import logprobs_of
from headwater.kernels.sampling.sample import Candidates, Draws
from headwater.kernels.sampling.token_mask import mask_tokens
from headwater.kernels.sampling.vocabulary_slice import VocabularySlice

from ...executor import AdmittedRow, Int32Array
from ..table.row_settings import RowSettings
from .device_head import DeviceHead
from .score_table import SampledScores, ScoreTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log probabilities on the device: of the chosen tokens [N], and of the likeliest [N, top] with
    their ids."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """Which steps beyond plain sampling the rows of a draw need: edits, filters, log
    probabilities."""

    edits: bool = False
    filters: bool = False
    scores: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of a draw on the device, int32 [S] each; padding has row -1."""

    rows: torch.Tensor
    positions: torch.Tensor
    """Position of the last token before each draw."""
    output_indices: torch.Tensor


PLAIN = Needs()
EVERYTHING = Needs(edits=True, filters=True, scores=True)
REHEARSED_ROWS = (32, 16, 2, 1)
"""Numbers of rows that take different products for the logits."""


class DeviceSampler:
    """Holds the workspace of sampling and, on the host, what is special about each row of the
    request table."""

    def __init__(
        self,
        head: DeviceHead,
        num_rows: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        num_parts: int,
    ) -> None:
        """Sizes: a table of `num_rows` rows, up to `num_positions` that are sampled at once, and up
        to `num_parts` draws in flight; dtype is that of hidden states."""
        self.head = head
        self._num_positions = num_positions
        self.dtype = dtype
        self._device = device
        self.vocab_size = head.lm_head.linear.out_features
        self._candidates = Candidates.allocate(num_positions, self.vocab_size, device)
        self.tokens = torch.zeros(num_positions, dtype=torch.int32, device=device)
        self._draws = Draws(
            temperatures=torch.zeros(num_positions, device=device),
            seeds=torch.zeros(num_positions, dtype=torch.int64, device=device),
            choice_indices=torch.zeros(num_positions, dtype=torch.int32, device=device),
            output_indices=torch.zeros(num_positions, dtype=torch.int32, device=device),
        )
        self._filters = Filters(
            top_ks=torch.zeros(num_positions, dtype=torch.int32, device=device),
            top_ps=torch.ones(num_positions, device=device),
            min_ps=torch.zeros(num_positions, device=device),
        )
        self._settings = RowSettings(num_rows, self.vocab_size, device)
        self._scores = ScoreTable(num_parts, num_positions, device)
        self._is_filtered = np.zeros(num_rows, np.bool_)

    def beside(self, head: DeviceHead, dtype: torch.dtype) -> DeviceSampler:
        """Returns a sampler for another head's logits of the same rows; this sampler admits the
        rows."""
        other = DeviceSampler(head, 1, self._num_positions, dtype, self._device, 1)
        other._settings = self._settings
        other._is_filtered = self._is_filtered
        return other

    def admit(self, admitted: AdmittedRow) -> None:
        row = admitted.row
        params = admitted.sampling
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._is_filtered[row] = filters and not params.is_greedy
        self._settings.admit(admitted)

    def needs(self, rows: Int32Array) -> Needs:
        return Needs(
            edits=bool(self._settings.is_edited[rows].any()),
            filters=bool(self._is_filtered[rows].any()),
            scores=bool((self._settings.num_logprobs[rows] >= 0).any()),
        )

    def draw(
        self,
        hidden: torch.Tensor,
        table_params: torch.Tensor,
        rows: torch.Tensor,
        output_indices: torch.Tensor,
    ) -> torch.Tensor:
        """One token for each row of hidden [S, H], int32 [S]. Launches only, so a graph can capture
        it."""
        draws, _ = self._load(table_params, rows, output_indices)
        tokens = self.tokens[: len(rows)]
        self.head.draw(hidden, draws, self._candidates, tokens)
        return tokens

    def draw_special(
        self,
        hidden: torch.Tensor,
        table_params: torch.Tensor,
        token_table: torch.Tensor,
        places: Places,
        needs: Needs,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `draw`, under masks int32 [S, words] if given, with what the rows need. token_table:
        int32 [rows, …]."""
        raw = self.head.lm_head(hidden) if needs.edits else self.head.product(hidden)
        return self.draw_from(raw, table_params, token_table, places, needs, masks)

    def draw_from(
        self,
        raw: torch.Tensor,
        table_params: torch.Tensor,
        token_table: torch.Tensor,
        places: Places,
        needs: Needs,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `draw_special`, from logits [S, V], or [S, N] of the tokens that this rank has."""
        draws, filters = self._load(table_params, places.rows, places.output_indices)
        tokens = self.tokens[: len(places.rows)]
        if needs.edits:
            # Edits read logits of any token.
            raw = self.head.whole(raw)
        kind = self.head.logits_of(raw)
        masks_first = masks is not None and (needs.filters or kind.masks_first)
        logits = raw
        if needs.edits or masks_first:
            logits = torch.empty(raw.shape, dtype=torch.float32, device=raw.device)
        if needs.edits:
            self._settings.edit(
                raw, places.rows, places.positions, places.output_indices, token_table, logits
            )
        if masks is not None and masks_first:
            # Filters look at the same logits again.
            mask_tokens(logits if needs.edits else raw, kind.masks(masks), logits)
            masks = None
        kind.draw_from(logits, draws, self._candidates, tokens, masks)
        if needs.filters:
            kind.draw_filtered(logits, draws, filters, tokens)
        if needs.scores:
            wanted = self._settings.num_logprobs_of(places.rows)
            self._scores.fill(raw, tokens, wanted, kind.tokens)
        return tokens

    def scores(self, step: int, rows: Int32Array) -> SampledScores:
        """Returns the scores of the rows [S] that were drawn last; they are there once the step is
        done."""
        return self._scores.copy(step, self._settings.num_logprobs[rows])

    def rehearse(self, table_params: torch.Tensor, token_table: torch.Tensor) -> None:
        """Launches what `draw_special` does for a padding row, so that no step compiles it."""
        head = self.head.lm_head.linear
        device = self._device
        for num_rows in REHEARSED_ROWS:
            self.head.lm_head(
                torch.zeros(num_rows, head.in_features, dtype=self.dtype, device=device)
            )
        # Columns at the same distances as in the buffers: kernels are compiled for the alignment of
        # pointers.
        padding = torch.zeros(3, 4, dtype=torch.int32, device=device)
        padding[0].fill_(-1)
        places = Places(*padding[:, :1])
        masks = torch.full((1, -(-head.out_features // 32)), -1, dtype=torch.int32, device=device)
        for needs in (
            Needs(edits, filters, scores=True)
            for edits in (True, False)
            for filters in (True, False)
        ):
            for given in (None, masks):
                hidden = torch.zeros(1, head.in_features, dtype=self.dtype, device=device)
                self.draw_special(hidden, table_params, token_table, places, needs, given)
        logits, kind = self.head.scored(hidden, 1)
        score(logits, self.tokens[:1], 1, kind.tokens)

    def _load(
        self, table_params: torch.Tensor, rows: torch.Tensor, output_indices: torch.Tensor
    ) -> tuple[Draws, Filters]:
        n = len(rows)
        every = self._draws
        filters = self._filters
        draws = Draws(
            temperatures=every.temperatures[:n],
            seeds=every.seeds[:n],
            choice_indices=every.choice_indices[:n],
            output_indices=output_indices,
        )
        some = Filters(
            top_ks=filters.top_ks[:n], top_ps=filters.top_ps[:n], min_ps=filters.min_ps[:n]
        )
        load_draws(table_params, rows, draws, some)
        return draws, some


def score(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, part: VocabularySlice | None = None
) -> Scores:
    chosen, top_ids, top_logprobs = logprobs_of(logits, token_ids, num_top, part)
    return Scores(chosen=chosen, top_ids=top_ids, top_logprobs=top_logprobs)
