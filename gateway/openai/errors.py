"""Maps named errors to HTTP status and OpenAI's envelope, in one table."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headwater.services.runtime import errors

HTTP: dict[type[errors.HeadwaterError], tuple[int, str]] = {
    errors.BadRequest: (400, "invalid_request_error"),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.PermissionDenied: (403, "permission_error"),
    errors.NotFound: (404, "invalid_request_error"),
    errors.SlowBody: (408, "invalid_request_error"),
    errors.BodyTooLarge: (413, "invalid_request_error"),
    errors.UnsupportedMediaType: (415, "invalid_request_error"),
    errors.LimitExceeded: (429, "rate_limit_error"),
    errors.ClientGone: (499, "invalid_request_error"),
    errors.InternalError: (500, "server_error"),
    errors.Unavailable: (503, "server_error"),
    errors.DeadlineExceeded: (504, "server_error"),
}


class MethodNotAllowed(errors.HeadwaterError):
    """A path that exists, requested with a method that it does not have. Only HTTP knows this
    error."""

    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: str) -> None:
        preflights = (
            "; preflights are answered to pages of --allowed-origins" if method == "OPTIONS" else ""
        )
        super().__init__(f"{path} does not take {method}; allowed: {allowed}{preflights}")
        self.allowed = allowed


def status_of(error: errors.HeadwaterError) -> int:
    return 405 if isinstance(error, MethodNotAllowed) else _row(error)[0]


def envelope(error: errors.HeadwaterError) -> dict[str, Any]:
    """The error as `{"error": {message, type, param, code}}`, as OpenAI's clients read it."""
    kind = "invalid_request_error" if isinstance(error, MethodNotAllowed) else _row(error)[1]
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    }


def headers_of(error: errors.HeadwaterError) -> list[tuple[bytes, bytes]]:
    headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if isinstance(error, errors.Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    return headers


def error_event(error: errors.HeadwaterError) -> bytes:
    """The event that ends a stream which had already begun."""
    return b"event: error\ndata: " + msgspec.json.encode(envelope(error)) + b"\n\n"


def _row(error: errors.HeadwaterError) -> tuple[int, str]:
    return next(
        (HTTP[cls] for cls in type(error).__mro__ if cls in HTTP), HTTP[errors.InternalError]
    )
