"""Headers of the Messages API: its version, and features that clients try."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.services.runtime.errors import BadRequest

from ..wire.noted import note

VERSIONS = ("2023-06-01", "2026-10-21")
"""Versions that are served, alike. Fields that the second one has no more are taken in both."""
MAX_BETA_CHARS = 4096
"""Characters of `anthropic-beta` that are read."""


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises `BadRequest` for another version of the API. Names of features that are not finished
    are named in the log, since what they change is refused or noted by its field."""
    version = headers.get("anthropic-version", VERSIONS[0])
    allowed = " or ".join(VERSIONS)
    BadRequest.unless(version in VERSIONS, "anthropic-version", version, allowed)
    for beta in headers.get("anthropic-beta", "")[:MAX_BETA_CHARS].split(","):
        if name := beta.strip()[:80]:
            note("beta without effect", name, beta=name)
