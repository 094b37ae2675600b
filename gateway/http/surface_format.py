"""Forms of errors, and headers of the request's id, as clients of each API read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.services.runtime.errors import HeadwaterError

from ..anthropic import errors as anthropic
from ..ollama import errors as ollama
from ..ollama.lines import JSON_LINES
from ..openai import errors as openai
from ..wire import http_errors
from ..wire.body_stream import Headers
from ..wire.sse import EVENT_STREAM

MESSAGES = "/v1/messages"
OLLAMA_ROOT = "/api"
ADMIN_ROOT = "/admin"


@dataclass(frozen=True, slots=True)
class SurfaceFormat:
    """Functions of an error, and of the request's id where the envelope has it."""

    status_of: Callable[[HeadwaterError], int]
    envelope: Callable[[HeadwaterError, str], dict[str, Any]]
    error_event: Callable[[HeadwaterError, str], bytes]
    id_headers: tuple[bytes, ...]
    stream_headers: Headers
    """Headers of a stream, besides those of every answer."""


OPENAI = SurfaceFormat(
    http_errors.status_of,
    lambda error, _: openai.envelope(error),
    lambda error, _: openai.error_event(error),
    (b"x-request-id",),
    EVENT_STREAM,
)
ANTHROPIC = SurfaceFormat(
    anthropic.status_of,
    anthropic.envelope,
    anthropic.error_event,
    (b"x-request-id", b"request-id"),
    EVENT_STREAM,
)
OLLAMA = SurfaceFormat(
    http_errors.status_of,
    lambda error, _: ollama.envelope(error),
    lambda error, _: ollama.error_line(error),
    (b"x-request-id",),
    JSON_LINES,
)


def format_of(path: str) -> SurfaceFormat:
    if _is_under(MESSAGES, path):
        return ANTHROPIC
    return OLLAMA if _is_under(OLLAMA_ROOT, path) else OPENAI


def takes_forms(path: str) -> bool:
    """Whether a body of JSON may be called a form, as `curl -d` calls one. Where operators change
    the deployment, it may not."""
    return not _is_under(ADMIN_ROOT, path)


def _is_under(root: str, path: str) -> bool:
    return path == root or path.startswith(f"{root}/")
