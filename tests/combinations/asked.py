"""What every cell asks: prompts, lengths, and the request in which capabilities meet. The same in
both worlds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.combinations.capability import Capability, Fields, Move

BLOCK_SIZE = 16
MAX_MODEL_LEN = 384
NUM_BLOCKS = 128
MAX_TOKENS = 32
COMPANY_TOKENS = 112
"""A longer answer, which ends after that of the request that it runs beside."""
MAX_DRAFT_TOKENS = 15
PLAIN: Fields = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "speculative": "off"}
"""Engines draft wherever a request lets them."""
RACES = frozenset(
    {*(Move.CROWD, Move.LOSS, Move.REPEAT, Move.WARM, Move.LENT, Move.HAND_OVER), Move.SLEEP}
)
COMPANY: Fields = {"temperature": 0.0, "max_tokens": COMPANY_TOKENS, "speculative": "off"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One run."""

    options: Fields
    """Of the engine."""
    fields: Fields
    """Of the request."""
    moves: frozenset[Move]
    weights: str = ""
    """Of the model: see `Capability`."""
    model: tuple[tuple[str, object], ...] = ()
    """Fields of its `config.json` that are changed."""
    awaited: tuple[Capability, ...] = ()
    """Capabilities that take place by a race of this request with another one or with a loss, which
    it may win, only on the engine that answered the same before, or once in many steps."""


def asked(
    capabilities: Sequence[Capability], needs: Fields, more: Fields, moves: frozenset[Move]
) -> Asked:
    """A request in which these capabilities meet; `more` are fields that depend on other
    answers."""
    options: dict[str, object] = {}
    model: Fields = {}
    fields: dict[str, object] = {**PLAIN, **needs}
    models = [each for each in capabilities if each.model]
    for each in sorted(models, key=lambda each: each.base is None):
        if each.aside(models) is None:
            model = each.model  # Nothing of another architecture stays.
    for each in capabilities:
        options |= each.options
        fields |= each.asks
        moves |= each.moves
    awaited = tuple(
        each
        for each in capabilities
        if (each.moves & RACES or each.is_probed) and each.aside(capabilities) is None
    )
    weights = next((each.weights for each in capabilities if each.weights), "")
    return Asked(
        options, fields | dict(more), moves, weights, tuple(sorted(model.items())), awaited
    )
