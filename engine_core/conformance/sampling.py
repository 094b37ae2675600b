"""Cases of sampling and pooling: edits of logits, masks, draws, filters, log probabilities, pooled
hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.sample import Draws

from ..executor import AdmittedRow, StepPlan
from ..platforms import specification
from ..sampling.edits import RequestEdits, edits_of
from ..sampling.pooling import POOLINGS, Pools
from ..sampling_params import SamplingParams
from .case import NUM_ITEMS, REGRET, Case
from .subject import Subject, rows_of

Columns = TypeVar("Columns", Draws, Filters)

VOCAB_SIZE = 997
NUM_TOP = 5
FILTERS: dict[str, dict[str, Any]] = {
    "draw_top_k": {"top_k": 20},
    "draw_top_p": {"top_p": 0.8},
    "draw_min_p": {"min_p": 0.05},
    "draw_all_filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
}
EDITS = {
    "allowed_token_ids": SamplingParams(allowed_token_ids=(3, 5, 996)),
    "bad_words": SamplingParams(bad_words=((7,), (11, 13))),
    "min_tokens": SamplingParams(min_tokens=4, min_tokens_blocked_ids=(2, 17)),
    "logit_bias": SamplingParams(logit_bias={1: 2.5, 990: -100.0}),
    "penalties": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
    ),
}
PROMPT_LENS = tuple(1 + (13 * i) % 31 for i in range(16))


def sampling_cases(subject: Subject) -> Iterator[Case]:
    platform = subject.platform()
    logits = subject.randn(NUM_ITEMS, VOCAB_SIZE, scale=3.0)
    yield from (_edit(platform, name, params, logits.float()) for name, params in EDITS.items())
    yield _mask(subject, platform, logits)
    for operation, temperature in (("draw_greedy", 0.0), ("draw_temperature", 0.8)):
        yield _draw(subject, platform, operation, logits, temperature)
    yield _masked_draw(subject, platform, logits)
    for operation, filters in FILTERS.items():
        yield _filtered_draw(subject, platform, operation, logits.float(), **filters)
    for operation, num_top in (("logprobs", NUM_TOP), ("prompt_logprobs", 0)):
        if operation == "logprobs" or subject.flags.prompt_logprobs:
            yield _logprobs(subject, platform, operation, logits, num_top)
    yield from (_pooling(subject, platform, pooling) for pooling in POOLINGS)


def _draws(subject: Subject, temperature: float) -> Draws:
    return Draws(
        temperatures=torch.full((NUM_ITEMS,), temperature),
        seeds=subject.integers(1 << 62, NUM_ITEMS) - (1 << 61),
        choice_indices=subject.integers(4, NUM_ITEMS).int(),
        output_indices=subject.integers(1000, NUM_ITEMS).int(),
    )


def _some(columns: Columns, items: list[int], platform: Any) -> Columns:
    return replace(
        columns,
        **{it.name: rows_of(getattr(columns, it.name), items, platform) for it in fields(columns)},
    )


def _masks(subject: Subject) -> Tensor:
    """Masks of about half of the tokens each."""
    words = subject.integers(1 << 32, NUM_ITEMS, -(-VOCAB_SIZE // 32))
    return (words - (1 << 31)).int()


def _edit(platform: Any, name: str, params: SamplingParams, logits: Tensor) -> Case:
    """Case of edits of logits on the platform's device, as `Sampler` makes them."""
    prompt = torch.tensor([4, 4, 9], dtype=torch.int32)
    output = torch.tensor([9, 12, 12, 11], dtype=torch.int32)
    ids = prompt.numpy()
    edits = edits_of(
        AdmittedRow(row=0, token_ids=ids, num_prompt_tokens=3, sampling=params, choice_index=0)
    )
    assert edits is not None
    request_edits = RequestEdits(edits)

    def run(items: list[int]) -> list[Tensor]:
        rows = rows_of(logits, items, platform).clone()
        for i in range(len(rows)):
            request_edits.apply(rows[i : i + 1], 3, output.numpy())
        return list(rows.clamp(min=-1e6))

    expected = [_edited(row.double(), params, prompt, output).clamp(min=-1e6) for row in logits]
    # Forbidden tokens have to agree exactly; the error is scaled by the others.
    allowed = 1e-6 if name in ("penalties", "logit_bias") else 0.0
    return Case(
        operation=f"edit_{name}",
        shapes=f"{len(logits)}x{VOCAB_SIZE}",
        run=run,
        expected=expected,
        allowed=allowed,
    )


def _edited(row: Tensor, params: SamplingParams, prompt: Tensor, output: Tensor) -> Tensor:
    """Twin of `RequestEdits.apply` after three tokens of output, written from the sampling
    contract."""
    if params.allowed_token_ids:
        allowed = torch.full_like(row, -math.inf)
        allowed[list(params.allowed_token_ids)] = 0
        row = row + allowed
    for word in params.bad_words:
        if list(word[:-1]) == output.tolist()[len(output) - len(word) + 1 :]:
            row[word[-1]] = -math.inf
    for token in params.min_tokens_blocked_ids if params.min_tokens > 3 else ():
        row[token] = -math.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if params.has_penalties:
        strengths = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        row = specification.penalties(row, prompt, output, *strengths)
    return row


def _mask(subject: Subject, platform: Any, logits: Tensor) -> Case:
    masks = _masks(subject)
    lowest = -1e6

    def run(items: list[int]) -> list[Tensor]:
        masked = platform.sampling.mask_tokens(
            rows_of(logits, items, platform), rows_of(masks, items, platform)
        )
        return list(masked.clamp(min=lowest))

    expected = list(specification.mask_tokens(logits, masks).clamp(min=lowest))
    return Case(
        operation="mask_tokens",
        shapes=f"{len(logits)}x{VOCAB_SIZE}",
        run=run,
        expected=expected,
        allowed=0.0,
    )


def _draw(
    subject: Subject, platform: Any, operation: str, logits: Tensor, temperature: float
) -> Case:
    draws = _draws(subject, temperature)

    def draw(items: list[int]) -> Any:
        return platform.sampling.draw(
            rows_of(logits, items, platform), _some(draws, items, platform)
        )

    return _case_of_draws(operation, draw, specification.scores(logits, draws))


def _masked_draw(subject: Subject, platform: Any, logits: Tensor) -> Case:
    draws = _draws(subject, 0.8)
    masks = _masks(subject)

    def draw(items: list[int]) -> Any:
        given = (
            rows_of(logits, items, platform),
            _some(draws, items, platform),
            rows_of(masks, items, platform),
        )
        return platform.sampling.draw(*given)

    masked = specification.mask_tokens(logits, masks)
    return _case_of_draws("draw_masked", draw, specification.scores(masked, draws))


def _filtered_draw(
    subject: Subject,
    platform: Any,
    operation: str,
    logits: Tensor,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Case:
    draws = _draws(subject, 0.8)
    filters = Filters(
        top_ks=torch.full((NUM_ITEMS,), top_k, dtype=torch.int32),
        top_ps=torch.full((NUM_ITEMS,), top_p),
        min_ps=torch.full((NUM_ITEMS,), min_p),
    )

    def draw(items: list[int]) -> Any:
        given = (
            rows_of(logits, items, platform),
            _some(draws, items, platform),
            _some(filters, items, platform),
        )
        return platform.sampling.draw_filtered(*given)

    kept = specification.filtered(logits, draws, filters)
    return _case_of_draws(
        operation, draw, specification.scores(logits, draws).masked_fill(~kept, -math.inf)
    )


def _case_of_draws(operation: str, draw: Callable[[list[int]], Any], scores: Tensor) -> Case:
    return Case(
        operation=operation,
        shapes=f"{len(scores)}x{VOCAB_SIZE}",
        run=lambda items: list(draw(items)[:, None]),
        expected=list(scores),
        allowed=REGRET,
        draws=True,
    )


def _logprobs(
    subject: Subject, platform: Any, operation: str, logits: Tensor, num_top: int
) -> Case:
    """The log probabilities of chosen tokens and of the likeliest, with the logits of the ids that
    come out."""
    chosen = subject.integers(VOCAB_SIZE, len(logits)).int()

    def run(items: list[int]) -> list[Tensor]:
        rows = rows_of(logits, items, platform)
        own, ids, tops = platform.sampling.logprobs(rows, rows_of(chosen, items, platform), num_top)
        return list(torch.cat((own[:, None], tops, rows.gather(1, ids.long()).float()), dim=1))

    twin = specification.logprobs(logits)
    best = twin.sort(dim=1, descending=True)
    parts = twin.gather(1, chosen.long()[:, None]), best.values[:, :num_top]
    top_logits = logits.double().gather(1, best.indices[:, :num_top])
    return Case(
        operation=operation,
        shapes=f"{len(logits)}x{VOCAB_SIZE} top {num_top}",
        run=run,
        expected=list(torch.cat((*parts, top_logits), dim=1)),
        allowed=2e-5,
    )


def _pooling(subject: Subject, platform: Any, pooling: str) -> Case:
    width = subject.size(83)
    hidden = [subject.randn(length, width) for length in PROMPT_LENS]
    params = SamplingParams(pooling=pooling)

    def run(items: list[int]) -> list[Tensor]:
        pools = Pools()
        vectors = {}
        for row, i in enumerate(items):
            ids = np.zeros(PROMPT_LENS[i], np.int32)
            pools.admit(
                AdmittedRow(
                    row=row,
                    token_ids=ids,
                    num_prompt_tokens=PROMPT_LENS[i],
                    sampling=params,
                    choice_index=0,
                )
            )
        states = torch.cat([hidden[i] for i in items]).to(platform.device)
        vectors = pools.take(_pooled_plan([PROMPT_LENS[i] for i in items]), states)
        return [vectors[row] for row in range(len(items))]

    return Case(
        operation=f"pool_{pooling}",
        shapes=f"{len(hidden)} prompts x{width}",
        run=run,
        expected=[specification.pool(states, pooling) for states in hidden],
        allowed=2e-5,
    )


def _pooled_plan(counts: list[int]) -> StepPlan:
    """Plan of whole prompts without sampled positions."""
    rows = np.arange(len(counts), dtype=np.int32)
    return StepPlan(
        step=0,
        rows=rows,
        starts=np.zeros_like(rows),
        counts=np.array(counts, np.int32),
        samples=np.zeros(len(rows), np.bool_),
        output_indices=np.zeros_like(rows),
        holds=np.zeros(len(rows), np.bool_),
        pooled_rows=rows.tolist(),
    )
