"""What may be said about speculation: by operators in an engine's settings, by clients in a request."""

from __future__ import annotations

MODES = ("auto", "off")
DRAFTERS = ("ngram", "suffix")
"""What looks tokens up."""
DRAFT_MODEL = "draft_model"
DRAFT_HEADS = "draft_heads"
NAMES = (*DRAFTERS, DRAFT_MODEL, DRAFT_HEADS)
"""Drafters that a request may name."""
MAX_DRAFT_TOKENS = 31
"""Of one request in one step."""
