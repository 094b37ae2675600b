"""No field of the sampling contract is passed over: what draws on a device, and what draws on a
CPU, reads each."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.kv.prefix_hash import HASH_LEN
from headwater.engine_core.sampling_params import SamplingParams
from headwater.proto.common_pb2 import POOLING_CLS, Sampling, TokenSequence
from headwater.proto.engine_pb2 import Add
from headwater.services.engine.stage.requests import Limits, PendingAdd, requests_of

CORE = Path(__file__).parents[2] / "engine_core"
OF_ENCODERS = {"second_start", "attended_len"}
"""Fields that only encoders read, which draw nothing: `test_encoders.py`."""
FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} - OF_ENCODERS


def files_of(folder: str) -> list[str]:
    return [path.relative_to(CORE).as_posix() for path in sorted((CORE / folder).rglob("*.py"))]


ABOVE_EXECUTORS = ["engine.py", *files_of("scheduling")]
"""They end answers, and plan what is scored and pooled."""
EXECUTORS = {
    "cpu": ["sampling/sampler.py", "sampling/edits.py", *ABOVE_EXECUTORS],
    "gpu": [
        "executors/table/device_table.py",
        "executors/exit/device_sampler.py",
        "executors/table/row_settings.py",
        "sampling/edits.py",
        *ABOVE_EXECUTORS,
    ],
    "simulated": [
        "executors/simulated/edits.py",
        *files_of("executors/simulated"),
        *ABOVE_EXECUTORS,
    ],
}
"""Files that read the fields for each executor. A new field is read by one of each list, or refused
by name where the request is taken: add it there."""
SMALLEST = {
    "num_logprobs": 0,
    "num_prompt_logprobs": 0,
    "pooling": "cls",
    "logit_bias": {1: 1.0},
    "top_k": 1,
}
"""Values of fields whose default tells no type, or that mean nothing at half of it."""


def read_in(file: str) -> set[str]:
    """Names of the attributes that a file reads of `params` or `sampling`."""
    return {
        node.attr
        for node in ast.walk(ast.parse((CORE / file).read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).rpartition(".")[2].lstrip("_") in ("params", "sampling")
    }


def other_value(field: dataclasses.Field[Any]) -> Any:
    """A value of the field that is not its default."""
    if field.name in SMALLEST:
        return SMALLEST[field.name]
    if field.name == "bad_words":
        return ((1,),)
    return (1,) if isinstance(field.default, tuple) else type(field.default)(field.default / 2 or 1)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_field_of_sampling_is_read_where_tokens_are_drawn(executor: str) -> None:
    read = set[str]().union(*map(read_in, EXECUTORS[executor]))
    unread = FIELDS - read
    assert not unread, (
        f"{unread} has no effect: read it as `params.NAME` in one of {EXECUTORS[executor][:4]}"
    )


def test_every_field_comes_from_the_engines_requests() -> None:
    add = Add(
        stream_ids=[1],
        num_prompt_tokens=1,
        prompt_ids=[3],
        cache_namespace=bytes(HASH_LEN),
        eos_token_ids=[2],
        bad_word_ids=[TokenSequence(token_ids=[4])],
        sampling=Sampling(
            stop_token_ids=[5], allowed_token_ids=[6], logit_bias={7: 1.0}, logprobs=True
        ),
    )
    for field in Sampling.DESCRIPTOR.fields:
        if field.has_presence and field.message_type is None and field.name != "logprobs":
            default = field.default_value
            setattr(
                add.sampling,
                field.name,
                "left" if isinstance(default, str) else type(default)(1) or True,
            )
    add.sampling.ClearField("ignore_eos")
    add.sampling.temperature = add.sampling.top_p = 0.5
    add.sampling.repetition_penalty = 2.0
    limits = Limits(vocab_size=10, max_model_len=10)
    [answer] = requests_of(PendingAdd(add, limits), limits, [1])
    add.sampling.max_tokens = 0
    add.pooling = POOLING_CLS
    [pooled] = requests_of(PendingAdd(add, limits), limits, [1])
    assert pooled.sampling.pooling == "cls"
    default = SamplingParams()
    same = {
        name
        for name in FIELDS - {"pooling"}
        if getattr(answer.sampling, name) == getattr(default, name)
    }
    assert not same, (
        f"{same} of an Add do not reach the core: see _sampling_of in services/engine/stage/requests.py"
    )
