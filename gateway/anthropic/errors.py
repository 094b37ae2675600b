"""Renders named errors in the envelope of the Messages API."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from headwater.services.runtime import errors

from ..wire import http_errors
from ..wire.http_errors import by_class
from ..wire.sse import typed_event

OVERLOADED = 529
TYPES: dict[type[errors.HeadwaterError], str] = {
    errors.Unauthenticated: "authentication_error",
    errors.PermissionDenied: "permission_error",
    errors.NotFound: "not_found_error",
    errors.BodyTooLarge: "request_too_large",
    errors.LimitExceeded: "rate_limit_error",
    errors.Unavailable: "overloaded_error",
    errors.DeadlineExceeded: "timeout_error",
}
"""Error classes for which Anthropic's API has a type name."""
_TOO_LONG = re.compile(
    r"the prompt has (?P<prompt>\d+) tokens( and max_tokens (?P<answer>\d+))?; allowed: "
    r"(1…)?(?P<allowed>\d+)"
)


def status_of(error: errors.HeadwaterError) -> int:
    return OVERLOADED if isinstance(error, errors.Unavailable) else http_errors.status_of(error)


def envelope(error: errors.HeadwaterError, request_id: str) -> dict[str, Any]:
    """The error as `{"type": "error", "error": {type, message}, request_id}`."""
    is_of_server = status_of(error) >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = by_class(TYPES, error, "api_error" if is_of_server else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": _message(error)},
        "request_id": request_id,
    }


def error_event(error: errors.HeadwaterError, request_id: str) -> bytes:
    """The event that ends a stream that has already begun."""
    return typed_event(envelope(error, request_id))


def _message(error: errors.HeadwaterError) -> str:
    """The error's sentence. Agents read the numbers in Anthropic's sentences about the context, to
    shorten the conversation or ask for a shorter answer; so it has these words."""
    found = _TOO_LONG.match(error.message)
    if getattr(error, "code", "") != errors.CONTEXT_TOO_LONG or found is None:
        return error.message
    prompt, answer, allowed = (found[name] for name in ("prompt", "answer", "allowed"))
    if answer is None or int(prompt) >= int(allowed):
        return f"prompt is too long: {prompt} tokens > {allowed} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {allowed}, "
        "decrease input length or `max_tokens` and try again"
    )
