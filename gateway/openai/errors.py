"""Renders named errors in OpenAI's envelope."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from headwater.services.runtime import errors

from ..wire.http_errors import by_class, status_of

TYPES: dict[type[errors.HeadwaterError], str] = {
    errors.Unauthenticated: "authentication_error",
    errors.PermissionDenied: "permission_error",
    errors.LimitExceeded: "rate_limit_error",
}
"""Error classes for which OpenAI's API has a type name."""


def envelope(error: errors.HeadwaterError) -> dict[str, Any]:
    """The error as `{"error": {message, type, param, code}}`, as OpenAI's clients read it."""
    is_of_server = status_of(error) >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = by_class(TYPES, error, "server_error" if is_of_server else "invalid_request_error")
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    }


def response_error(error: errors.HeadwaterError) -> dict[str, Any]:
    """The event of an error amid those of a response, without its number."""
    fields: dict[str, Any] = envelope(error)["error"]
    return fields | {"type": "error"}


def error_event(error: errors.HeadwaterError) -> bytes:
    """The event that ends a stream that has already begun."""
    return b"event: error\ndata: " + msgspec.json.encode(envelope(error)) + b"\n\n"
