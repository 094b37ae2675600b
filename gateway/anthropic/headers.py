"""Headers of the Messages API: its version, and features that clients try."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.services.runtime.errors import BadRequest

from ..wire.noted import note

VERSIONS = ("2023-06-01", "2026-10-21")
"""Versions that are served, alike. Fields that the second one has no more are taken in both."""
MAX_BETA_CHARS = 4096
"""Characters of `anthropic-beta` that are read."""


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a client of Anthropic's API asks, also on paths that it shares with OpenAI's: all of
    them send its version."""
    return "anthropic-version" in headers


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises `BadRequest` for an unknown version of the API. Names of beta features are logged; the
    fields of such features are checked where they are decoded."""
    version = headers.get("anthropic-version", VERSIONS[0])
    allowed = " or ".join(VERSIONS)
    BadRequest.unless(version in VERSIONS, "anthropic-version", version, allowed)
    for beta in headers.get("anthropic-beta", "")[:MAX_BETA_CHARS].split(","):
        if name := beta.strip()[:80]:
            note("beta without effect", name, beta=name)
