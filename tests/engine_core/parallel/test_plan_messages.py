"""Plans and results as they cross from one process to another."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from headwater.engine_core.executor import AdmittedRow, DrawPlan, Int32Array, StepPlan, StepResult
from headwater.engine_core.parallel.plan_messages import (
    PREPARE,
    decode,
    encode_draw,
    encode_prepare,
    encode_step,
)
from headwater.engine_core.parallel.result_messages import decode_result, encode_result
from headwater.engine_core.request import TokenLogprobs
from headwater.engine_core.sampling_params import SamplingParams

EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=1 / 3,
    top_k=7,
    min_p=0.1,
    presence_penalty=-1.5,
    seed=-(1 << 62) - 1,
    stop_token_ids=(3, 5),
    bad_words=((1,), (2, 9)),
    allowed_token_ids=(4, 8),
    logit_bias={7: -100.0, 12: 0.1},
    num_logprobs=0,
)


def step_of(message: bytes) -> StepPlan:
    plan = decode(message, None)
    assert isinstance(plan, StepPlan)
    return plan


def draw_of(message: bytes, masks: Int32Array | None) -> DrawPlan:
    plan = decode(message, masks)
    assert isinstance(plan, DrawPlan)
    return plan


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def step(**more: Any) -> StepPlan:
    given: dict[str, Any] = {
        "step": 9,
        "released": [],
        "admitted": [],
        "block_rows": ints(),
        "block_indices": ints(),
        "block_ids": ints(),
        "rows": ints(4, 1, 2),
        "starts": ints(10, 0, 5),
        "counts": ints(1, 7, 3),
        "samples": np.array([True, False, True]),
        "output_indices": ints(3, 0, 1),
        "holds": np.zeros(3, np.bool_),
    }
    return StepPlan(**given | more)


def columns(plan: object) -> dict[str, Any]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}  # type: ignore[arg-type]
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def test_a_step_arrives_as_it_was_sent() -> None:
    plans = [
        step(),
        step(
            shares=False,
            released=[7, 8],
            prompt_logprob_rows=[1],
            pooled_rows=[2],
        ),
        step(
            num_drafts=ints(0, 2, 1),
            draft_ids=ints(5, 6, 7),
            follows=np.array([False, True, False]),
        ),
        step(
            num_drafts=ints(0, 0, 0),
            draft_ids=ints(),
            block_rows=ints(4, 4),
            block_indices=ints(0, 1),
        ),
        step(copied_blocks=ints(5, 6, 7, 8).reshape(2, 2)),
    ]
    for plan in plans:
        message = encode_step(plan)
        assert columns(step_of(message)) == columns(plan)


def test_a_message_without_a_plan_is_its_number() -> None:
    assert decode(encode_prepare(), None) == PREPARE


def test_columns_that_arrived_may_be_written_as_torch_does() -> None:
    plan = step_of(encode_step(step()))
    torch.from_numpy(plan.starts).add_(1)
    assert plan.starts.tolist() == [11, 1, 6]


def test_admitted_rows_arrive_with_every_field_of_their_sampling() -> None:
    rows = [
        AdmittedRow(
            row=3, token_ids=ints(1, 2, 3), num_prompt_tokens=2, sampling=EVERYTHING, choice_index=1
        ),
        AdmittedRow(
            row=0, token_ids=ints(9), num_prompt_tokens=1, sampling=SamplingParams(), choice_index=0
        ),
    ]
    arrived = step_of(encode_step(step(admitted=rows))).admitted
    assert [columns(row) for row in arrived] == [columns(row) for row in rows]


def test_a_draw_takes_the_masks_of_its_rows_along_and_of_no_others() -> None:
    masks = np.arange(2 * 5 * 3, dtype=np.int32).reshape(2, 5, 3)
    plan = DrawPlan(
        step=4,
        rows=ints(3, 1),
        positions=ints(8, 9),
        output_indices=ints(0, 2),
        masks=masks,
        num_drafts=ints(1, 0),
    )
    message = encode_draw(plan)
    first = draw_of(message, None)
    assert np.array_equal(first.masks[:, 3], masks[:, 3])
    assert np.array_equal(first.masks[0, 1], masks[0, 1])
    assert not first.masks[1, 1].any()
    masks[0, 1] = -7
    again = draw_of(encode_draw(plan), first.masks)
    assert again.masks is first.masks
    assert again.masks[0, 1].tolist() == [-7, -7, -7]
    assert columns(again) | {"masks": 0} == columns(plan) | {"masks": 0}


def test_a_result_arrives_with_its_log_probabilities_to_the_bit() -> None:
    exact = [float(np.float32(value)) for value in (-1 / 3, -math.pi, -1e-30, -math.inf)]
    entries = [
        TokenLogprobs(logprob=value, top_ids=[7] * n, top_logprobs=exact[:n])
        for n, value in enumerate(exact)
    ]
    result = StepResult(
        token_ids=np.arange(6, dtype=np.int32).reshape(3, 2),
        num_tokens=ints(2, 1, 1),
        num_drafts=ints(1, 0, 0),
        logprobs={0: entries[0], 5: entries[2]},
        prompt_logprobs={3: entries[1:], 1: []},
        embeddings={2: b"abcd" * 5, 0: b""},
    )
    message = encode_result(result)
    assert columns(decode_result(message)) == columns(result)
    nothing = StepResult(token_ids=np.empty((0, 1), np.int32), num_tokens=ints())
    assert columns(decode_result(encode_result(nothing))) == columns(nothing)
    assert decode_result(encode_result(nothing)).token_ids.shape == (0, 1)
