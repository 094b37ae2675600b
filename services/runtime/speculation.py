"""Names and limits of speculation, in an engine's settings and in a client's request."""

from __future__ import annotations

MODES = ("auto", "off")
DRAFTERS = ("ngram", "suffix")
"""Drafters that look tokens up."""
DRAFT_MODEL = "draft_model"
DRAFT_HEADS = "draft_heads"
NAMES = (*DRAFTERS, DRAFT_MODEL, DRAFT_HEADS)
"""Drafters that a request may name."""
MAX_DRAFT_TOKENS = 31
"""Largest number of draft tokens of one request in one step."""
