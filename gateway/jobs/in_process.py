"""Calls the gateway's own REST surface without a socket, on behalf of an identified tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from ..tenancy.tenants import KnownTenant, Tenant

Message = MutableMapping[str, Any]
KNOWN_TENANT = "headwater.known_tenant"
KNOWN_REQUEST = "headwater.known_request"
"""Keys of the ASGI scope that hold the identified tenant and a `KnownRequest`."""


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request of the gateway itself whose id its client knows already."""

    id: str
    created: int


@dataclass(slots=True)
class Reply:
    """A whole answer."""

    status: int = 499
    body: bytes = b""
    request_id: str = ""


async def call(
    app: ASGIApp,
    path: str,
    body: bytes,
    tenant: Tenant,
    priority: int,
    *,
    method: str = "POST",
    known: KnownRequest | None = None,
    on_body: Callable[[bytes], None] | None = None,
) -> Reply:
    """Sends a JSON body or none, and returns the answer. Cancelling the call counts as the client's
    disconnect. `on_body` gets a good answer as it comes."""
    reply = Reply()
    asked = [body]
    for_ever = asyncio.Event()

    async def receive() -> Message:
        if asked:
            return {"type": "http.request", "body": asked.pop(), "more_body": False}
        await for_ever.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            piece = message.get("body", b"")
            if on_body is not None and reply.status == 200:
                on_body(piece)
            else:
                reply.body += piece

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"content-type", b"application/json"), (b"x-priority", b"%d" % priority)],
        KNOWN_TENANT: KnownTenant(tenant),
        KNOWN_REQUEST: known,
    }
    await app(scope, receive, send)
    return reply
