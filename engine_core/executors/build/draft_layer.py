"""Whether the layer for multi-token prediction of the served model's checkpoint drafts, as the
options say or as the model's folder allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from ...capabilities import Refusal
from ...config import require
from ...options import AUTO, MTP, OFF, SPECULATIONS, ExecutorOptions
from ...weights.draft_layer import has_draft_layer

log = logging.getLogger(__name__)


def decided(
    options: ExecutorOptions, refusals: Callable[[ExecutorOptions], Iterator[Refusal]]
) -> ExecutorOptions:
    """The options with `speculation` either `mtp` or `off`. `refusals`: what is refused of some
    options. Raises `ConfigError` for a layer that is asked for and not there."""
    chosen = options.speculation
    require(chosen in SPECULATIONS, "speculation", chosen, " or ".join(SPECULATIONS))
    if chosen == MTP:
        _check(options)
    if chosen != AUTO:
        return options
    asked = replace(options, speculation=MTP)
    found = _reason(asked, refusals)
    return replace(options, speculation=OFF) if found else asked


def _reason(
    asked: ExecutorOptions, refusals: Callable[[ExecutorOptions], Iterator[Refusal]]
) -> str:
    """Why the layer of the model's folder does not draft; empty: it does."""
    assert asked.model_folder is not None
    # Random weights have the layer where it is asked for.
    if asked.load_format != AUTO or not has_draft_layer(asked.model_folder):
        return "there is none"
    if not asked.max_draft_tokens:
        return "nothing is drafted"
    refused = next(refusals(asked), None)
    if refused is None:
        return ""
    field, value, allowed = refused
    log.info(
        "the layer for multi-token prediction of this model drafts nothing: %s is %r; allowed: %s",
        *(field, value, allowed),
    )
    return field


def _check(options: ExecutorOptions) -> None:
    """Raises `ConfigError` where no layer is there that could draft."""
    assert options.model_folder is not None
    is_there = options.load_format != AUTO or has_draft_layer(options.model_folder)
    allowed = "auto or off with a model whose checkpoint has no layer for multi-token prediction"
    require(is_there, "speculation", MTP, allowed)
    require(options.max_draft_tokens, "speculation", MTP, "off where nothing is drafted")
