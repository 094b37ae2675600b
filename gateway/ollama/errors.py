"""Renders named errors in the envelope of Ollama's API, which is a sentence."""

from __future__ import annotations

from typing import Any

from headwater.services.runtime.errors import HeadwaterError

from .lines import line


def envelope(error: HeadwaterError) -> dict[str, Any]:
    return {"error": error.message}


def error_line(error: HeadwaterError) -> bytes:
    """The line that ends a stream that has already begun."""
    return line(envelope(error))
