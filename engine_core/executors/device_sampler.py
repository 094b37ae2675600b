"""From hidden states to tokens on a GPU, in the order of `sampler`. Plain and filtered draws are launches only; rows
that edit logits or want log probabilities take extra launches of torch, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headwater.engine_core.executor import AdmittedRow, Int32Array
from headwater.engine_core.layers.dense import DenseLinear
from headwater.engine_core.layers.lm_head import LMHead
from headwater.engine_core.sampling.sampler import edit, edits_logits
from headwater.engine_core.sampling_params import SamplingParams
from headwater.kernels.device import upload
from headwater.kernels.filtered_sample import Filters, filtered_sample
from headwater.kernels.lm_head_sample import MAX_ROWS, lm_head_sample
from headwater.kernels.logprobs import logprobs
from headwater.kernels.sample import Candidates, Draws, sample
from headwater.kernels.step_rows import load_draws
from headwater.kernels.token_mask import mask_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log probabilities on the device: of the chosen tokens [N], and of the likeliest [N, top] with their ids."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the host knows of rows that are sampled, [S] each."""

    rows: Int32Array
    ends: Int32Array
    """Tokens before the one that is sampled."""
    output_indices: Int32Array
    masks: torch.Tensor | None = None
    """int32 [S, words] on the device."""


REHEARSED_ROWS = (32, 16, 2, 1)
"""For each of which another product makes the logits."""
Known = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""From a table row and its number of tokens to the ids of its prompt and of its outputs."""


class DeviceSampler:
    """Holds the workspace of sampling and, on the host, what is special about each row of the request table."""

    def __init__(
        self, lm_head: LMHead, num_rows: int, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """For a table of `num_rows` rows, and up to `num_positions` that are sampled at once; dtype is that of hidden
        states."""
        self._lm_head, self._dtype, self._device = lm_head, dtype, device
        head = lm_head.linear
        self._dense_head = head.weight if isinstance(head, DenseLinear) else None
        """[V, H], where one launch makes logits and samples."""
        self._candidates = Candidates.allocate(num_positions, head.out_features, device)
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
        self.params = [SamplingParams()] * num_rows
        self._is_filtered = np.zeros(num_rows, np.bool_)
        self._is_edited = np.zeros(num_rows, np.bool_)
        self._num_logprobs = np.full(num_rows, -1, np.int32)

    def admit(self, admitted: AdmittedRow) -> None:
        row, params = admitted.row, admitted.sampling
        self.params[row] = params
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._is_filtered[row] = filters and not params.is_greedy
        self._is_edited[row] = edits_logits(params)
        self._num_logprobs[row] = -1 if params.num_logprobs is None else params.num_logprobs

    def is_plain(self, rows: Int32Array) -> bool:
        """Whether `draw` is all that these rows need."""
        return not (self.is_filtered(rows) or self.needs_host(rows))

    def is_filtered(self, rows: Int32Array) -> bool:
        return bool(self._is_filtered[rows].any())

    def needs_host(self, rows: Int32Array) -> bool:
        """Whether some need `draw_special`, whose launches are not the same every time."""
        return bool((self._is_edited[rows] | (self._num_logprobs[rows] >= 0)).any())

    def draw(
        self, hidden: torch.Tensor, table_params: torch.Tensor, rows: torch.Tensor, output_indices: torch.Tensor
    ) -> torch.Tensor:
        """One token for each row of hidden [S, H], int32 [S]; launches only, so that a graph can hold it."""
        draws, _ = self._load(table_params, rows, output_indices)
        tokens = self.tokens[: len(rows)]
        if len(rows) <= MAX_ROWS and self._dense_head is not None:
            lm_head_sample(hidden, self._dense_head, draws, self._candidates, tokens)
        else:
            sample(self._lm_head(hidden), draws, self._candidates, tokens)
        return tokens

    def draw_masked(
        self,
        hidden: torch.Tensor,
        masks: torch.Tensor,
        table_params: torch.Tensor,
        rows: torch.Tensor,
        output_indices: torch.Tensor,
        *,
        is_filtered: bool,
    ) -> torch.Tensor:
        """As `draw`, under masks int32 [S, words] and, if so, filters."""
        draws, filters = self._load(table_params, rows, output_indices)
        tokens = self.tokens[: len(rows)]
        logits = self._lm_head(hidden)
        masked = torch.empty_like(logits, dtype=torch.float32)
        mask_tokens(logits, masks, masked)
        sample(masked, draws, self._candidates, tokens)
        if is_filtered:
            filtered_sample(masked, draws, filters, tokens)
        return tokens

    def draw_special(
        self,
        hidden: torch.Tensor,
        table_params: torch.Tensor,
        rows: torch.Tensor,
        output_indices: torch.Tensor,
        drawn: Drawn,
        known: Known,
    ) -> tuple[torch.Tensor, dict[int, int], Scores | None]:
        """As `draw`, under filters, edits and masks. Returns also the index of each scored row among the scores."""
        draws, filters = self._load(table_params, rows, output_indices)
        tokens = self.tokens[: len(rows)]
        raw = self._lm_head(hidden)
        logits = raw
        if self._is_edited[drawn.rows].any():
            logits = raw.float()
            for i in np.flatnonzero(self._is_edited[drawn.rows]).tolist():
                row, end = int(drawn.rows[i]), int(drawn.ends[i])
                edit(logits[i], self.params[row], int(drawn.output_indices[i]), *known(row, end))
        if drawn.masks is not None:
            masked = torch.empty_like(logits, dtype=torch.float32) if logits is raw else logits
            mask_tokens(logits, drawn.masks, masked)
            logits = masked
        sample(logits, draws, self._candidates, tokens)
        if self.is_filtered(drawn.rows):
            filtered_sample(logits, draws, filters, tokens)
        wanted = np.flatnonzero(self._num_logprobs[drawn.rows] >= 0).tolist()
        if not wanted:
            return tokens, {}, None
        num_top = int(self._num_logprobs[drawn.rows].max())
        at = upload(np.array(wanted, np.int32), raw.device).long()
        return tokens, {j: i for i, j in enumerate(wanted)}, score(raw[at], tokens[at], num_top)

    def rehearse(self, table_params: torch.Tensor) -> None:
        """Launches once what `draw_special` does, for a row of padding, so that no step compiles it."""
        head, no_row = self._lm_head.linear, torch.full((1,), -1, dtype=torch.int32, device=table_params.device)
        draws, filters = self._load(table_params, no_row, torch.zeros_like(no_row))
        for num_rows in REHEARSED_ROWS:
            hidden = torch.zeros(num_rows, head.in_features, dtype=self._dtype, device=self._device)
            raw = self._lm_head(hidden)[:1]
        masked, everything = raw.float(), no_row.expand(-(-head.out_features // 32))[None, :].contiguous()
        mask_tokens(raw, everything, masked)
        mask_tokens(masked, everything, masked)
        for logits in (raw, masked):
            sample(logits, draws, self._candidates, self.tokens[:1])
            filtered_sample(logits, draws, filters, self.tokens[:1])
        score(raw, self.tokens[:1], 1)

    def num_logprobs(self, row: int) -> int:
        return int(self._num_logprobs[row])

    def _load(
        self, table_params: torch.Tensor, rows: torch.Tensor, output_indices: torch.Tensor
    ) -> tuple[Draws, Filters]:
        n, every, filters = len(rows), self._draws, self._filters
        draws = Draws(
            temperatures=every.temperatures[:n],
            seeds=every.seeds[:n],
            choice_indices=every.choice_indices[:n],
            output_indices=output_indices,
        )
        some = Filters(top_ks=filters.top_ks[:n], top_ps=filters.top_ps[:n], min_ps=filters.min_ps[:n])
        load_draws(table_params, rows, draws, some)
        return draws, some


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Scores:
    num_rows = len(token_ids)
    scores = Scores(
        chosen=torch.empty(num_rows, device=logits.device),
        top_ids=torch.empty(num_rows, num_top, dtype=torch.int32, device=logits.device),
        top_logprobs=torch.empty(num_rows, num_top, device=logits.device),
    )
    logprobs(logits, token_ids, scores.chosen, scores.top_ids, scores.top_logprobs)
    return scores
