"""Names and limits of speculation, in an engine's settings and in a client's request."""

from __future__ import annotations

OFF = "off"
MODES = ("auto", OFF)
"""Modes of a request."""
DRAFTERS = ("ngram", "suffix")
"""Drafters that look tokens up."""
DRAFT_MODEL = "draft_model"
DRAFT_HEADS = "draft_heads"
MTP = "mtp"
NAMES = (*DRAFTERS, DRAFT_MODEL, DRAFT_HEADS, MTP)
"""Drafters that a request may name."""
SPECULATIONS = ("auto", MTP, OFF)
"""Modes of an engine. `mtp`: the layer for multi-token prediction of the model's checkpoint drafts;
`auto`: it does where there is one that can."""
MAX_DRAFT_TOKENS = 31
"""Largest number of draft tokens of one request in one step."""
