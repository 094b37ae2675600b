"""Sampling of a request in Python: the fields of the API's contract under their own names.

Ranges are checked by the contract itself (`services/processor/parameters.py`), not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headwater.proto import common_pb2

from ..runtime.errors import BadRequest
from ..runtime.request_limits import WHAT_FITS

UNLIMITED = -1
_OTHERS = ("stop", "logprobs", "structured_outputs", "truncate_prompt_tokens", "speculative")
"""Fields whose form here differs from the contract's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Constraint on an answer; exactly one field is given."""

    json: Mapping[str, Any] | str | None = None
    """JSON Schema, as an object or as JSON."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    """Lark grammar."""
    structural_tag: Mapping[str, Any] | str | None = None

    def to_pb(self) -> common_pb2.StructuredOutput:
        """Raises `BadRequest` unless one field is given."""
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise BadRequest.of("structured_outputs", given, f"one of {', '.join(names)}")
        value = getattr(self, given[0])
        match given[0]:
            case "json":
                return common_pb2.StructuredOutput(json_schema=_text_of(value))
            case "structural_tag":
                return common_pb2.StructuredOutput(structural_tag=_text_of(value))
            case "choice":
                choices = common_pb2.StructuredOutput.Choices(choices=value)
                return common_pb2.StructuredOutput(choice=choices)
            case name:
                return common_pb2.StructuredOutput(**{name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of a request. None: the model's default where `generation_config.json` has one,
    otherwise the neutral value. Meanings and ranges are those of docs/api.md."""

    n: int | None = None
    """Number of answers."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """None: drawn for each request."""
    max_tokens: int | None = None
    """Largest number of tokens of an answer. None: what the context leaves."""
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logprobs: int | None = None
    """Number of alternatives whose log probabilities come with each token's own. None: none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""
    truncate_prompt_tokens: int | None = None
    """Number of last tokens of the prompt that are kept. −1: as many as fit."""
    truncation_side: str | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: str | None = None
    """`auto` or `off`; it changes no token."""

    def to_pb(self) -> common_pb2.Sampling:
        """Raises `BadRequest` for a value that its field cannot hold."""
        sampling = common_pb2.Sampling()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name not in _OTHERS:
                _merge(sampling, field.name, value)
        if self.stop is not None:
            _merge(sampling, "stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        if self.logprobs is not None:
            sampling.logprobs = True
            _merge(sampling, "top_logprobs", self.logprobs, name_in_errors="logprobs")
        if self.truncate_prompt_tokens is not None:
            asked = self.truncate_prompt_tokens
            _merge(sampling, "truncate_prompt_tokens", WHAT_FITS if asked == UNLIMITED else asked)
        if self.structured_outputs is not None:
            sampling.structured_output.CopyFrom(self.structured_outputs.to_pb())
        if self.speculative is not None:
            sampling.speculative.mode = self.speculative
        return sampling


def _merge(
    sampling: common_pb2.Sampling, name: str, value: Any, *, name_in_errors: str = ""
) -> None:
    """Sets a field. Raises `BadRequest` for a value of another type, or out of the field's size."""
    try:
        sampling.MergeFrom(common_pb2.Sampling(**{name: value}))
    except (TypeError, ValueError):
        raise BadRequest.of(name_in_errors or name, value, "a value of the field's type") from None


def _text_of(value: Mapping[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value)
