"""Options of Ollama's API in the contract's form."""

from __future__ import annotations

from headwater.proto import common_pb2
from headwater.services.runtime.errors import BadRequest

from .schema import Options

_SAME = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
"""Options that the contract has under the same names."""
ALL_TOKENS = -1
UNLIMITED = (-1, -2)
"""Values of `num_predict`: without end, and to the end of the context."""
ANY_SEED = -1
NAMES = {
    **{name: f"options.{name}" for name in (*_SAME, "seed", "stop")},
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
}
"""Clients' names of options, by the contract's names."""


def options_to_pb(asked: Options | None) -> common_pb2.Sampling:
    """Raises `BadRequest`."""
    options = asked or Options()
    _check_window(options)
    sampling = common_pb2.Sampling(**{name: getattr(options, name) for name in _SAME})
    if options.repeat_penalty is not None:
        sampling.repetition_penalty = options.repeat_penalty
    if options.seed not in (None, ANY_SEED):
        sampling.seed = options.seed
    if options.stop is not None:
        sampling.stop.extend([options.stop] if isinstance(options.stop, str) else options.stop)
    length = options.num_predict
    if length is not None and length not in UNLIMITED:
        allowed = "at least 1, or −1: what the context leaves"
        BadRequest.unless(length >= 1, "options.num_predict", length, allowed)
        sampling.max_tokens = length
    return sampling


def _check_window(options: Options) -> None:
    """Raises `BadRequest` for a window of penalties. They hold for all tokens: a window changes
    nothing where there are no penalties."""
    has_penalty = (
        options.repeat_penalty not in (None, 1)
        or bool(options.presence_penalty)
        or bool(options.frequency_penalty)
    )
    window = options.repeat_last_n
    if has_penalty and window not in (None, ALL_TOKENS):
        allowed = "−1, beside a penalty: penalties hold for all tokens"
        raise BadRequest.of("options.repeat_last_n", window, allowed)
