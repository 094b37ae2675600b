"""Roles of engines: which part of a request routing sends to them first. Every engine can do all of
it."""

from __future__ import annotations

BOTH = "both"
PREFILL = "prefill"
DECODE = "decode"
ROLES = (BOTH, PREFILL, DECODE)
