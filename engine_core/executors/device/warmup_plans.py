"""Plans like those of an engine's first steps: a prompt, one decode row, several at once, each way
of sampling. Their keys and values are written to the scratch block, so they have no effect."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from ...config import EngineConfig
from ...executor import AdmittedRow, DrawPlan, Executor, StepPlan
from ...sampling_params import SamplingParams

NUM_TOKENS = 24
"""Tokens of a prompt alone, and of prompts together: more would make a start longer."""
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(
        temperature=0.8, seed=3, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
    ),
    SamplingParams(temperature=0.8, seed=4, num_logprobs=2),
    # The token of this row is drawn in a separate plan, under a mask.
    SamplingParams(temperature=0.8, seed=5),
)


def warmup_plans(config: EngineConfig, vocab_size: int) -> Iterator[StepPlan | DrawPlan]:
    """Plans to be computed in order; the last one gives the rows of the table back."""
    num_rows = min(len(SAMPLINGS), config.max_num_seqs)
    long = max(1, min(NUM_TOKENS, config.max_model_len - 2, config.max_num_batched_tokens))
    short = max(1, long // num_rows)
    rows = np.arange(num_rows, dtype=np.int32)
    admitted = [_admitted(row, SAMPLINGS[row], long, vocab_size) for row in range(num_rows)]
    alone = rows[:1]
    yield _step(alone, 0, long, admitted=admitted[:1])
    yield _step(alone, long, 1)
    yield _step(rows, 0, short, admitted=admitted[1:])
    masks = np.full((1, num_rows, -(-vocab_size // 32)), -1, np.int32)
    for index in (1, 2)[: config.max_model_len - short - 1]:
        yield _step(rows, short + index - 1, 1, index, holds=rows == num_rows - 1)
        drawn = rows[-1:]
        at = np.array([short + index], np.int32)
        yield DrawPlan(
            step=0,
            rows=drawn,
            positions=at,
            output_indices=np.array([index], np.int32),
            masks=masks,
        )
    yield _step(alone, 0, 1, released=rows.tolist())


def seconds_of_a_step(executor: Executor, config: EngineConfig, vocab_size: int) -> float:
    """Computes the plans for what they touch. Returns the seconds of a step of the whole budget at
    the quickest plan's pace: others touch memory for the first time, or have few tokens."""
    paces: list[float] = []
    for plan in warmup_plans(config, vocab_size):
        start = time.perf_counter()
        if isinstance(plan, StepPlan):
            executor.retire(executor.submit(plan))
            paces.append((time.perf_counter() - start) / plan.num_tokens)
        else:
            executor.retire(executor.draw(plan))
    return min(paces) * config.max_num_batched_tokens


def _admitted(row: int, sampling: SamplingParams, prompt_len: int, vocab_size: int) -> AdmittedRow:
    # Far apart, since embeddings are read from a file that nobody has looked at yet.
    token_ids = ((row * prompt_len + np.arange(prompt_len)) * 7919 % vocab_size).astype(np.int32)
    return AdmittedRow(
        row=row,
        token_ids=token_ids,
        num_prompt_tokens=prompt_len,
        sampling=sampling,
        choice_index=0,
    )


def _step(
    rows: np.ndarray[tuple[int], np.dtype[np.int32]],
    start: int,
    count: int,
    output_index: int = 0,
    *,
    admitted: list[AdmittedRow] | None = None,
    released: list[int] | None = None,
    holds: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None,
) -> StepPlan:
    """Plan of one step of rows that are all at the same position and use the scratch block."""
    ones = np.ones_like(rows)
    holds = np.zeros(len(rows), np.bool_) if holds is None else holds
    return StepPlan(
        step=0,
        released=released or [],
        admitted=admitted or [],
        rows=rows,
        starts=start * ones,
        counts=count * ones,
        samples=~holds,
        output_indices=output_index * ones,
        holds=holds,
    )
