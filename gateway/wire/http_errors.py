"""Maps named errors to HTTP status and headers, in one table. Knows no envelopes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from headwater.services.runtime import errors

ValueT = TypeVar("ValueT")


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


class PathNotServed(errors.NotFound):
    """A path of another server that is not served, with an alternative."""

    def __init__(self, path: str, instead: str) -> None:
        super().__init__("path", path)
        self.args = (f"{self}; {instead}",)


STATUS: dict[type[errors.HeadwaterError], int] = {
    errors.BadRequest: 400,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.NotFound: 404,
    MethodNotAllowed: 405,
    errors.SlowBody: 408,
    errors.BodyTooLarge: 413,
    errors.UnsupportedMediaType: 415,
    errors.LimitExceeded: 429,
    errors.ClientGone: 499,
    errors.InternalError: 500,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
}


def status_of(error: errors.HeadwaterError) -> int:
    return by_class(STATUS, error, 500)


def by_class(
    table: Mapping[type[errors.HeadwaterError], ValueT],
    error: errors.HeadwaterError,
    otherwise: ValueT,
) -> ValueT:
    """Value of the error's class, or of the nearest class above it that the table has."""
    return next((table[cls] for cls in type(error).__mro__ if cls in table), otherwise)


def headers_of(error: errors.HeadwaterError) -> list[tuple[bytes, bytes]]:
    headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if isinstance(error, errors.Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    return headers
