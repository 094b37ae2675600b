"""One HTTP request and its response over ASGI: body within a limit, headers, JSON, a stream, the client leaving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import msgspec

from headwater.gateway.openai import errors as http_errors
from headwater.gateway.openai.sse import SseStream
from headwater.services import errors

Message = MutableMapping[str, Any]
JSON = b"application/json"
DISCARD_FACTOR = 16
"""A refused body up to so many limits is read over; of a longer one the connection is closed."""


class Exchange:
    """Wraps what an ASGI server gives; `status` is what was answered, 499 when the client left first."""

    def __init__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]
    ) -> None:
        self._receive, self._send = receive, send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.reply_headers: list[tuple[bytes, bytes]] = []
        self.request_id = ""
        """Answered as `x-request-id`."""
        self.stream: SseStream | None = None
        self.status = 499
        self._client_left = False

    async def body(self, limit: int) -> bytes:
        """Raises `BodyTooLarge` as soon as that is known, `UnsupportedMediaType` for what is said not to be JSON."""
        media_type = self.headers.get("content-type", "application/json")
        if media_type.split(";")[0].strip().lower() != "application/json":
            raise errors.UnsupportedMediaType(media_type[:100])
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            if int(declared) > DISCARD_FACTOR * limit:
                self.reply_headers.append((b"connection", b"close"))
            raise errors.BodyTooLarge(limit)
        chunks, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._client_left = True
                raise errors.ClientGone("the client left before its request was whole")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                self.reply_headers.append((b"connection", b"close"))
                raise errors.BodyTooLarge(limit)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def reply_json(self, content: Any, status: int = 200) -> None:
        await self.reply(msgspec.json.encode(content), JSON, status)

    async def reply(self, body: bytes, media_type: bytes, status: int = 200) -> None:
        headers = [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), *self._headers()]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def open_stream(self, on_writable: Callable[[], None]) -> SseStream:
        """A stream of events; its response begins with the first of them."""
        self.stream = SseStream(self._send, self._headers(), on_writable)
        return self.stream

    async def end_stream(self, last_events: bytes) -> None:
        assert self.stream is not None
        try:
            await self.stream.close(last_events)
        except errors.ClientGone:
            self._client_left = True
            raise
        self.status = 200

    async def refuse(self, error: errors.HeadwaterError) -> None:
        """By status and envelope; by an event, where a stream has already begun; not at all, where nobody listens."""
        self.status = http_errors.status_of(error)
        if self._client_left:
            return
        if self.stream is not None and self.stream.started:
            with contextlib.suppress(errors.ClientGone):
                await self.stream.close(http_errors.error_event(error))
        else:
            self.reply_headers += http_errors.headers_of(error)
            await self.reply(msgspec.json.encode(http_errors.envelope(error)), JSON, self.status)

    async def close(self) -> None:
        """Whatever was still to be written is given up."""
        if self.stream is not None:
            await self.stream.abandon()

    async def unless_client_leaves(
        self, work: Coroutine[Any, Any, None], *, silence: float, on_silence: Callable[[], None]
    ) -> None:
        """Runs `work`; cancels it and raises `ClientGone` when the client leaves. Says so each `silence` seconds."""
        task, gone = asyncio.create_task(work), asyncio.create_task(self._gone())
        try:
            while not task.done():
                done, _ = await asyncio.wait((task, gone), timeout=silence, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    on_silence()
                elif gone in done and task not in done:
                    self._client_left = True
                    raise errors.ClientGone("the client has left")
            await task
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        return self.reply_headers + ([(b"x-request-id", self.request_id.encode())] if self.request_id else [])

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
