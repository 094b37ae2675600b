"""Messages of an executor to its ranks: plans, as columns of numbers. No message can run code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..executor import (
    AdapterCopy,
    AdapterPlace,
    AdmittedRow,
    DrawPlan,
    Int32Array,
    StepPlan,
    SwapPlan,
)
from ..ragged import places
from ..sampling.verification import positions_of
from ..sampling_params import SamplingParams
from .arrays import Array, pack, unpack

STEP, DRAW, WARM_UP, PREPARE, SWAP = range(5)
STEP_COLUMNS: dict[str, type] = {
    "block_rows": np.int32,
    "block_indices": np.int32,
    "block_ids": np.int32,
    "rows": np.int32,
    "starts": np.int32,
    "counts": np.int32,
    "samples": np.bool_,
    "output_indices": np.int32,
    "holds": np.bool_,
    "num_drafts": np.int32,
    "draft_ids": np.int32,
    "follows": np.bool_,
    "copied_blocks": np.int32,
}
LISTS = ("released", "prompt_logprob_rows", "pooled_rows")
STEP_TYPES = (*STEP_COLUMNS.values(), *(np.int32 for _ in LISTS), np.int64, np.int32, np.uint8)
SWAP_COLUMNS = ("out_blocks", "out_slots", "in_slots", "in_blocks")
DRAW_COLUMNS = ("rows", "positions", "output_indices", "num_drafts")
_DEFAULTS = SamplingParams()


def encode_step(plan: StepPlan) -> bytes:
    columns: list[Array | None] = [getattr(plan, name) for name in STEP_COLUMNS]
    columns += [np.array(getattr(plan, name), np.int32) for name in LISTS]
    facts = b""
    token_ids = np.empty(0, np.int32)
    if plan.admitted:
        new_rows = [
            [
                *(a.row, len(a.token_ids), a.num_prompt_tokens, a.choice_index, a.adapter),
                _asked(a.sampling),
            ]
            for a in plan.admitted
        ]
        facts = json.dumps(new_rows).encode()
        token_ids = np.concatenate([admitted.token_ids for admitted in plan.admitted])
    return pack(
        [STEP, plan.step, int(plan.shares)],
        [*columns, _copies(plan), token_ids, np.frombuffer(facts, np.uint8)],
    )


def _copies(plan: StepPlan) -> Array:
    """int64 [copies of adapters, slot and place]; ranks do not know an adapter by its hash."""
    rows = []
    for slot, _, place in plan.copied_adapters:
        assert place is not None
        rows.append((slot, *place))
    return np.array(rows, np.int64)


def encode_draw(plan: DrawPlan) -> bytes:
    """The masks of the plan's rows go with it, [sum of positions, words] row by row."""
    num_positions = positions_of(plan.num_drafts, len(plan.rows))
    masks = plan.masks[places(num_positions), np.repeat(plan.rows, num_positions)]
    columns = [getattr(plan, name) for name in DRAW_COLUMNS]
    return pack([DRAW, plan.step, *plan.masks.shape], [*columns, masks])


def encode_swap(plan: SwapPlan) -> bytes:
    return pack([SWAP], [getattr(plan, name) for name in SWAP_COLUMNS])


def encode_warm_up() -> bytes:
    return pack([WARM_UP], [])


def encode_prepare() -> bytes:
    return pack([PREPARE], [])


def decode(message: bytes, masks: Int32Array | None) -> StepPlan | DrawPlan | SwapPlan | int:
    """A plan, or the number of another message; `masks`: see `_decode_draw`."""
    kind = int(np.frombuffer(message, np.int64, 2)[1])
    if kind == STEP:
        return _decode_step(message)
    if kind == DRAW:
        return _decode_draw(message, masks)
    return _decode_swap(message) if kind == SWAP else kind


def _decode_step(message: bytes) -> StepPlan:
    (_, step, shares), arrays = unpack(message, STEP_TYPES)
    count = len(STEP_COLUMNS)
    columns: dict[str, Any] = dict(zip(STEP_COLUMNS, arrays[:count], strict=True))
    columns["copied_blocks"] = columns["copied_blocks"].reshape(-1, 2)
    for name, values in zip(LISTS, arrays[count : count + len(LISTS)], strict=True):
        assert values is not None
        columns[name] = values.tolist()
    copies, token_ids, facts = arrays[-3:]
    assert copies is not None
    assert token_ids is not None
    assert facts is not None
    return StepPlan(
        step=step,
        shares=bool(shares),
        admitted=_admitted(token_ids, facts.tobytes()),
        copied_adapters=[
            AdapterCopy(slot, b"", AdapterPlace(*place))
            for slot, *place in copies.reshape(-1, 1 + len(AdapterPlace._fields)).tolist()
        ],
        **columns,
    )


def _decode_draw(message: bytes, masks: Int32Array | None) -> DrawPlan:
    """`masks` is the table of the plan before, which this one's are written into; None: there was
    none."""
    (_, step, *shape), arrays = unpack(message, (*(np.int32 for _ in DRAW_COLUMNS), np.int32))
    columns: dict[str, Any] = dict(zip(DRAW_COLUMNS, arrays[:-1], strict=True))
    table: Int32Array = np.zeros(shape, np.int32) if masks is None else masks
    num_positions = positions_of(columns["num_drafts"], len(columns["rows"]))
    own = arrays[-1]
    assert own is not None
    table[places(num_positions), np.repeat(columns["rows"], num_positions)] = own.reshape(
        -1, shape[-1]
    )
    return DrawPlan(step=step, masks=table, **columns)


def _decode_swap(message: bytes) -> SwapPlan:
    _, arrays = unpack(message, tuple(np.int32 for _ in SWAP_COLUMNS))
    columns: dict[str, Any] = dict(zip(SWAP_COLUMNS, arrays, strict=True))
    return SwapPlan(**columns)


def _asked(sampling: SamplingParams) -> dict[str, Any]:
    """Fields that differ from the defaults."""
    fields = {
        field.name: getattr(sampling, field.name) for field in dataclasses.fields(SamplingParams)
    }
    return {name: value for name, value in fields.items() if value != getattr(_DEFAULTS, name)}


def _sampling(asked: dict[str, Any]) -> SamplingParams:
    fields: dict[str, Any] = {}
    for name, value in asked.items():
        fields[name] = _tuples(value) if isinstance(value, list) else value
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    return SamplingParams(**fields)


def _tuples(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_tuples(each) if isinstance(each, list) else each for each in values)


def _admitted(token_ids: Int32Array, facts: bytes) -> list[AdmittedRow]:
    found = []
    at = 0
    admitted = json.loads(facts) if facts else ()
    for row, length, num_prompt_tokens, choice_index, adapter, asked in admitted:
        found.append(
            AdmittedRow(
                row=row,
                token_ids=token_ids[at : at + length],
                num_prompt_tokens=num_prompt_tokens,
                sampling=_sampling(asked),
                choice_index=choice_index,
                adapter=adapter,
            )
        )
        at += length
    return found
