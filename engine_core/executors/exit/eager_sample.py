"""Sampling where plans are computed at once: from the hidden states of a step to tokens in the
request table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ...executor import NO_RESULT, DrawPlan, Int32Array, StepPlan, StepResult
from ...models.model import Model, score_head_of
from ...ragged import places
from ...request import TokenLogprobs
from ...sampling.pooling import Pools
from ...sampling.sampler import Sampler
from ...sampling.verification import by_entry, gained, positions_of
from ..entry.eager_entry import EagerStep
from ..table.eager_table import EagerTable
from .stage_messages import Sender, send_tokens

SCORED_AT_ONCE = 256
"""Prompt positions whose logits exist at the same time."""
HeldRow = tuple[torch.Tensor, range]
"""Logits [P, V] of a step, and which of them are the row's."""


class EagerSample:
    """See `Exit`. A sampled token is in the table before the next plan reads it."""

    def __init__(
        self,
        decoder: Model,
        table: EagerTable,
        sampler: Sampler,
        device: torch.device,
        senders: Sequence[Sender] = (),
    ) -> None:
        """`senders`: to earlier stages, which are sent the sampled tokens."""
        self._decoder = decoder
        self._table = table
        self._sampler = sampler
        self._device = device
        self._senders = senders
        self._pools = Pools(score_head_of(decoder))
        self._held: dict[int, HeldRow] = {}
        """Keyed by table row, for a draw."""

    def adopt(self, decoder: Model) -> None:
        """Computes later steps with another model of the same shapes."""
        self._decoder = decoder

    def precede(self, plan: StepPlan) -> None:
        for row in plan.released:
            self._held.pop(row, None)
        for admitted in plan.admitted:
            self._sampler.admit(admitted)
            self._pools.admit(admitted)

    def give(self, sent: EagerStep, hidden: torch.Tensor) -> Callable[[], StepResult]:
        plan = sent.plan
        prompt_logprobs = {
            row: self._score_prompt(plan, hidden, row) for row in plan.prompt_logprob_rows
        }
        vectors = self._pools.take(plan, hidden)
        result = NO_RESULT
        if sent.num_sampled.any():
            logits = self._decoder.logits(sent.final(hidden))
            if plan.holds.any():
                logits = self._hold(sent, logits)
            if plan.samples.any():
                result = self._sample_rows(sent, logits)
        if plan.num_drafts is not None and plan.draft_ids is None:
            result = replace(result, num_drafts=plan.num_drafts[plan.samples])
        embeddings = {row: vector.cpu().numpy().tobytes() for row, vector in vectors.items()}
        result = replace(result, prompt_logprobs=prompt_logprobs, embeddings=embeddings)
        return lambda: result

    def draw(self, plan: DrawPlan) -> Callable[[], StepResult]:
        logits = _joined([self._held.pop(row) for row in plan.rows.tolist()])
        num_positions = positions_of(plan.num_drafts, len(plan.rows))
        masks = plan.masks[places(num_positions), np.repeat(plan.rows, num_positions)]
        result = self._sample(
            logits, plan.rows, plan.positions, num_positions, plan.output_indices, masks
        )
        return lambda: result

    def close(self) -> None:
        self._held.clear()

    def _hold(self, sent: EagerStep, logits: torch.Tensor) -> torch.Tensor:
        """Keeps the logits that are drawn later; returns those that are sampled now."""
        plan = sent.plan
        num_positions = sent.num_sampled
        first = np.cumsum(num_positions) - num_positions
        held = (
            plan.rows[plan.holds].tolist(),
            first[plan.holds].tolist(),
            num_positions[plan.holds].tolist(),
        )
        self._held |= {
            row: (logits, range(at, at + count)) for row, at, count in zip(*held, strict=True)
        }
        return logits[torch.from_numpy(np.repeat(plan.samples, num_positions)).to(self._device)]

    def _sample_rows(self, sent: EagerStep, logits: torch.Tensor) -> StepResult:
        plan = sent.plan
        num_positions = sent.num_sampled[plan.samples]
        first = (plan.starts + plan.counts)[plan.samples] - num_positions + 1
        outputs = plan.output_indices[plan.samples]
        return self._sample(logits, plan.rows[plan.samples], first, num_positions, outputs)

    def _sample(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        first: Int32Array,
        num_positions: Int32Array,
        output_indices: Int32Array,
        masks: Int32Array | None = None,
    ) -> StepResult:
        """logits [P, V] and masks [P, words] of the num_positions of each row, whose first token
        goes to position `first`."""
        table = self._table
        place = places(num_positions)
        each = np.repeat(rows, num_positions)
        at = np.repeat(first, num_positions) + place
        sampled, scores = self._sampler.sample(
            logits,
            each,
            np.repeat(output_indices, num_positions) + place,
            lambda i: table.outputs(int(each[i]), int(at[i])),
            masks,
        )
        token_ids = table.token_ids.numpy()
        found = gained(sampled, token_ids[each, at], num_positions)
        i, column = found.places
        token_ids[rows[i], first[i] + column] = found.token_ids[i, column]
        table.num_known[rows] = first + found.num_tokens
        send_tokens(self._senders, found.token_ids, found.num_tokens)
        logprobs = by_entry(found, num_positions, scores)
        return StepResult(token_ids=found.token_ids, num_tokens=found.num_tokens, logprobs=logprobs)

    def _score_prompt(self, plan: StepPlan, hidden: torch.Tensor, row: int) -> list[TokenLogprobs]:
        """Log probabilities of the prompt tokens after the positions that the row computes."""
        table = self._table
        i = int(np.flatnonzero(plan.rows == row)[0])
        start = int(plan.starts[i])
        first = int(plan.counts[:i].sum())
        count = min(int(plan.counts[i]), int(table.num_prompt[row]) - 1 - start)
        next_ids = table.token_ids[row, start + 1 : start + 1 + count].to(self._device)
        entries: list[TokenLogprobs] = []
        for at in range(0, count, SCORED_AT_ONCE):
            end = min(at + SCORED_AT_ONCE, count)
            logits = self._decoder.logits(hidden[first + at : first + end])
            entries += self._sampler.score_prompt(logits, next_ids[at:end], row)
        return entries


def _joined(held: list[HeldRow]) -> torch.Tensor:
    """Logits [P, V] of all positions: the step's own tensor, uncopied, where all of its positions
    are drawn."""
    logits = held[0][0]
    wanted = [i for _, positions in held for i in positions]
    if wanted == list(range(len(logits))) and all(each is logits for each, _ in held):
        return logits
    return torch.cat([each[positions.start : positions.stop] for each, positions in held])
