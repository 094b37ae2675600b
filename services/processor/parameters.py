"""The sampling contract of every surface: accepted values, defaults, and refusals.

Two steps, since limits on length need the prompt: `check_sampling` before it is tokenized,
`fit_context` after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.engine_core.capabilities import (
    BEST_OF,
    BY_FIELD,
    STREAM,
    Asked,
    refusals_of_request,
)
from headwater.engine_core.sampling_params import GREEDY_TEMPERATURE
from headwater.proto import common_pb2

from ..runtime.errors import BadRequest, ContextTooLong
from ..runtime.request_limits import WHAT_FITS, check_sampling_sizes
from ..runtime.slices import slices
from ..runtime.speculation import MAX_DRAFT_TOKENS, MODES, NAMES
from ..text.model_limits import ModelLimits

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_BEAMS = MAX_TOP_LOGPROBS // 2
LEAST_TOP_P = 1e-9
"""Smaller values keep the same token, the likeliest, and may be 0 in the float32 of engines."""
SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a number may have."""

    accepts: Callable[[float], bool]
    allowed: str


def _between(low: float, high: float) -> Range:
    return Range(lambda value: low <= value <= high, f"{low:g}…{high:g}")


# No comparison holds for NaN, so every range refuses it.
RANGES: Mapping[str, Range] = {
    "n": _between(1, MAX_CHOICES),
    "temperature": _between(0, 2),
    "top_p": Range(lambda value: 0 < value <= 1, "above 0, up to 1"),
    "top_k": Range(lambda value: value >= -1, "−1 or 0 (off), or at least 1"),
    "min_p": _between(0, 1),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    # What float32 rounds to 0 or to infinity makes logits that are no numbers, or stops the engine
    # that divides by it.
    "repetition_penalty": _between(1e-6, 1e6),
    "best_of": _between(1, MAX_CHOICES),
    # A power of any length is a number.
    "length_penalty": _between(-10, 10),
    "top_logprobs": _between(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": _between(0, MAX_TOP_LOGPROBS),
}
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "min_tokens": 0,
    "logprobs": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "echo": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
}


def check_sampling(
    asked: common_pb2.Sampling, limits: ModelLimits, *, stream: bool, is_chat: bool = False
) -> common_pb2.Sampling:
    """A copy with every default but `max_tokens` filled in. Raises `BadRequest` for what the
    contract refuses. An answer of a chat has a token at least; a completion may ask for its prompt
    alone."""
    check_sampling_sizes(asked, limits.vocab_size)
    checked = common_pb2.Sampling()
    checked.CopyFrom(asked)
    # Beams are ranked by the model's own log probabilities, whatever it would draw from.
    defaults = {} if asked.use_beam_search else limits.defaults
    for name, neutral in NEUTRAL.items():
        if not _has(checked, name):
            setattr(checked, name, defaults.get(name, neutral))
    for name, allowed in RANGES.items():
        if _has(checked, name) and not allowed.accepts(value := getattr(checked, name)):
            raise BadRequest.of(name, value, allowed.allowed)
    _check_combinations(checked, stream)
    _check_max_tokens(checked, is_chat)
    _check_strings(checked)
    _check_ids(checked, limits.vocab_size)
    _check_speculative(checked.speculative)
    checked.top_k = min(max(checked.top_k, 0), limits.vocab_size)
    checked.top_p = max(checked.top_p, LEAST_TOP_P)
    return checked


def check_defaults(limits: ModelLimits) -> None:
    """Raises `BadRequest` for a default of the model's own that no request may have."""
    for name, value in limits.defaults.items():
        try:
            asked = common_pb2.Sampling(**{name: value})
        except (TypeError, ValueError):
            raise BadRequest.of(name, value, "a number that the field can hold") from None
        check_sampling(asked, replace(limits, defaults={}), stream=False)


def _has(sampling: common_pb2.Sampling, name: str) -> bool:
    return sampling.HasField(name)  # type: ignore[arg-type] # the stub wants a literal


def _check_combinations(checked: common_pb2.Sampling, stream: bool) -> None:
    if checked.use_beam_search:
        _check_beam_search(checked)
    for name in () if checked.use_beam_search else ("n", "best_of"):
        num_choices = getattr(checked, name)
        if num_choices > 1 and checked.temperature < GREEDY_TEMPERATURE:
            raise BadRequest(
                name,
                f"{name} is {num_choices} with temperature {checked.temperature:g}; allowed: 1, "
                "greedy is one answer",
            )
    if _has(checked, "best_of"):
        BadRequest.unless(
            checked.best_of >= checked.n, "best_of", checked.best_of, f"at least n ({checked.n})"
        )
    for name, sentence in refusals_of_request(_asked(checked, stream=stream)):
        raise BadRequest(name, sentence)
    if _has(checked, "top_logprobs") and not checked.logprobs:
        raise BadRequest(
            "top_logprobs",
            f"top_logprobs is {checked.top_logprobs} without logprobs; allowed: with logprobs",
        )
    if _has(checked, "truncate_prompt_tokens") and checked.truncate_prompt_tokens == 0:
        raise BadRequest.of("truncate_prompt_tokens", 0, "at least 1")
    if _has(checked, "truncation_side") and checked.truncation_side not in SIDES:
        raise BadRequest.of("truncation_side", checked.truncation_side, " or ".join(SIDES))


def _asked(checked: common_pb2.Sampling, *, stream: bool) -> dict[str, Asked]:
    """Capabilities that a request asks for, by fields that differ from their neutral values."""
    asked = {STREAM: Asked("stream", True)} if stream else {}
    for field, value in checked.ListFields():
        row = BY_FIELD.get(field.name)
        if row is not None and value != NEUTRAL.get(field.name):
            asked.setdefault(row.name, Asked(field.name, value))
    if checked.use_beam_search or checked.best_of <= checked.n:
        # The width of a search, or no more candidates than choices.
        asked.pop(BEST_OF, None)
    return asked


def _check_max_tokens(checked: common_pb2.Sampling, is_chat: bool) -> None:
    if _has(checked, "max_tokens") and checked.max_tokens == 0 and not checked.echo:
        raise BadRequest.of(
            "max_tokens", 0, "at least 1" if is_chat else "at least 1, or 0 with echo"
        )


def _check_beam_search(checked: common_pb2.Sampling) -> None:
    """Raises `BadRequest` for what no beam search may have."""
    width = max(checked.n, checked.best_of)
    if width > MAX_BEAMS:
        raise BadRequest(
            "use_beam_search", f"use_beam_search with {width} beams; allowed: at most {MAX_BEAMS}"
        )
    if not checked.max_tokens and _has(checked, "max_tokens"):
        raise BadRequest.of("max_tokens", 0, "at least 1 with use_beam_search")


def _check_strings(checked: common_pb2.Sampling) -> None:
    if len(checked.stop) > MAX_STOP_STRINGS:
        raise BadRequest(
            "stop", f"stop has {len(checked.stop)} strings; allowed: at most {MAX_STOP_STRINGS}"
        )
    for name, strings in (("stop", checked.stop), ("bad_words", checked.bad_words)):
        BadRequest.unless("" not in strings, name, list(strings), "strings that are not empty")


def _check_ids(checked: common_pb2.Sampling, vocab_size: int) -> None:
    check_vocabulary("stop_token_ids", checked.stop_token_ids, vocab_size)
    check_vocabulary("allowed_token_ids", checked.allowed_token_ids, vocab_size)
    check_vocabulary("logit_bias", list(checked.logit_bias), vocab_size)
    for token_id, bias in list(checked.logit_bias.items()):
        if not math.isfinite(bias):
            raise BadRequest.of(f"logit_bias[{token_id}]", bias, "a finite number")
        checked.logit_bias[token_id] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))


def _check_speculative(asked: common_pb2.Speculative) -> None:
    if asked.HasField("mode") and asked.mode not in MODES:
        raise BadRequest.of("speculative.mode", asked.mode, " or ".join(MODES))
    if asked.HasField("drafter") and asked.drafter not in NAMES:
        raise BadRequest.of("speculative.drafter", asked.drafter, ", ".join(NAMES))
    if asked.HasField("max_tokens") and not 1 <= asked.max_tokens <= MAX_DRAFT_TOKENS:
        raise BadRequest.of("speculative.max_tokens", asked.max_tokens, f"1…{MAX_DRAFT_TOKENS}")


def check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises `BadRequest` for the highest id where it lies outside the vocabulary."""
    highest = max(map(max, slices(token_ids)), default=0)
    BadRequest.unless(highest < vocab_size, name, highest, f"token ids 0…{vocab_size - 1}")


def fit_context(
    checked: common_pb2.Sampling, prompt_ids: list[int], limits: ModelLimits, *, prompt_name: str
) -> list[int]:
    """The prompt as it is computed; sets `max_tokens`. Raises `ContextTooLong` or `BadRequest`."""
    if _has(checked, "truncate_prompt_tokens"):
        prompt_ids = _truncated(checked, prompt_ids, limits)
    BadRequest.unless(prompt_ids, prompt_name, "", "at least one token")
    left = limits.max_model_len - len(prompt_ids)
    asked = checked.max_tokens if _has(checked, "max_tokens") else None
    if left < (1 if asked is None else asked):
        raise ContextTooLong(prompt_name, len(prompt_ids), asked, limits.max_model_len)
    if asked is None:
        checked.max_tokens = min(left, limits.defaults.get("max_tokens", left))
    if checked.min_tokens > checked.max_tokens:
        raise BadRequest.of(
            "min_tokens", checked.min_tokens, f"0…{checked.max_tokens} (max_tokens)"
        )
    return prompt_ids


def _truncated(
    checked: common_pb2.Sampling, prompt_ids: list[int], limits: ModelLimits
) -> list[int]:
    """The prompt cut to its last tokens, or to its first ones if the client says so."""
    num_tokens = checked.truncate_prompt_tokens
    if num_tokens == WHAT_FITS:
        num_tokens = max(
            1, limits.max_model_len - (checked.max_tokens if _has(checked, "max_tokens") else 1)
        )
    elif num_tokens > limits.max_model_len:
        raise BadRequest.of("truncate_prompt_tokens", num_tokens, f"1…{limits.max_model_len}")
    return (
        prompt_ids[:num_tokens] if checked.truncation_side == "right" else prompt_ids[-num_tokens:]
    )


def bad_word_sequences(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Each word as the tokens that spell it, where a text begins and after a space."""
    sequences = [
        tuple(encode(spelling)) for word in words for spelling in (word, " " + word.lstrip())
    ]
    return [list(sequence) for sequence in dict.fromkeys(sequences) if sequence]
