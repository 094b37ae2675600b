"""Forms of errors, and headers of the request's id, as clients of each API read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.services.runtime.errors import HeadwaterError

from ..anthropic import errors as anthropic
from ..openai import errors as openai
from ..wire import http_errors

MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class SurfaceFormat:
    """Functions of an error, and of the request's id where the envelope has it."""

    status_of: Callable[[HeadwaterError], int]
    envelope: Callable[[HeadwaterError, str], dict[str, Any]]
    error_event: Callable[[HeadwaterError, str], bytes]
    id_headers: tuple[bytes, ...]


OPENAI = SurfaceFormat(
    http_errors.status_of,
    lambda error, _: openai.envelope(error),
    lambda error, _: openai.error_event(error),
    (b"x-request-id",),
)
ANTHROPIC = SurfaceFormat(
    anthropic.status_of,
    anthropic.envelope,
    anthropic.error_event,
    (b"x-request-id", b"request-id"),
)


def format_of(path: str) -> SurfaceFormat:
    is_of_messages = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return ANTHROPIC if is_of_messages else OPENAI
