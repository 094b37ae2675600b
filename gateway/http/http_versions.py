"""Clients of other versions of HTTP than 1.1, and of none: answers without chunks for 1.0,
sentences for the others."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headwater.services.runtime import errors

from ..openai.errors import envelope
from ..wire.http_errors import headers_of, status_of

H2_PREFACE = b"PRI * HTTP/2.0\r\n"
"""Bytes with which a client begins that uses HTTP/2 without asking. This server does not speak it.
"""
_TOLD = "HTTP/2 is not spoken at this port; allowed: HTTP/1.1, or gRPC at the port for it"


def h2_refusal() -> bytes:
    """Refusal in HTTP/1.1, which clients of HTTP/2 and gRPC recognize and report."""
    return raw_refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, _TOLD)


def raw_refusal(status: HTTPStatus, message: str) -> bytes:
    """Bytes that answer what is no request; the connection ends with them."""
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": status.name.lower(),
    }
    return _raw(status, {"error": error}, [])


def raw_error(error: errors.HeadwaterError) -> bytes:
    """Like `raw_refusal`, for a connection on which no request was read."""
    return _raw(
        HTTPStatus(status_of(error)),
        envelope(error),
        headers_of(error),
    )


def _raw(status: HTTPStatus, envelope: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> bytes:
    body = msgspec.json.encode(envelope)
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}".encode(),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
        *(name + b": " + value for name, value in headers),
    ]
    return b"\r\n".join((*head, b"", body))


def head_without_upgrade(line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A request's head, after its first line, without the field `Upgrade`: without it there is no
    upgrade."""
    fields = (name + b": " + value for name, value in headers if name != b"upgrade")
    return b"\r\n".join((line, *fields, b"", b""))


def end_with_connection(cycle: RequestResponseCycle) -> None:
    """Lets an answer of unknown length end with its connection.

    NOTE: uvicorn (0.54) sends chunks to clients of HTTP/1.0 too, which do not know them. nginx in
    front asks in 1.0 unless it is told otherwise.
    """
    framed = cycle.send
    has_no_length = False

    async def send(message: Any) -> None:
        nonlocal has_no_length
        if message["type"] == "http.response.start":
            has_no_length = not any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            )
            if has_no_length:
                cycle.chunked_encoding = False
        elif has_no_length:
            # Each chunk has the length that its header announced.
            cycle.expected_content_length = len(message.get("body", b""))
        await framed(message)

    cycle.send = send  # type: ignore[method-assign] # the application is given what stands here
