"""Version of the installed transformers, without importing it or torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def transformers_version() -> str:
    """Empty: it is not installed."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""
