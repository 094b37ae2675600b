"""Roles of engines: which part of a request routing sends to them first. Every engine can do all of it."""

from __future__ import annotations

BOTH, PREFILL, DECODE = "both", "prefill", "decode"
ROLES = (BOTH, PREFILL, DECODE)
