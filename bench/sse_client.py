"""A client that streams answers from an OpenAI-compatible server and records the arrival of each
piece.

Built for rate, on the event loop's transports and a C parser, so that one process can watch tens of
thousands of events a second; the server under test should be the bottleneck, not this.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools


@dataclass(slots=True)
class Outcome:
    """Result of one request. Times are in seconds on the monotonic clock."""

    sent_at: float
    first_at: float = 0.0
    """Arrival of the first piece with content."""
    last_at: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Seconds between successive arrivals of content."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    reply: str = ""
    """Text of the answer, filled only on request."""

    @property
    def ttft(self) -> float:
        return self.first_at - self.sent_at

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.last_at - self.first_at) / max(1, self.completion_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.last_at - self.sent_at


class ServerLostError(ConnectionError):
    """The server closed the connection before the answer ended."""


class SseConnection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._outcome = Outcome(0.0)
        self._tail = b""
        self._body = bytearray()
        self._keep_body = False
        self._host = self._prefix = ""

    @classmethod
    async def open(cls, base_url: str) -> SseConnection:
        """Opens a connection; `base_url` is given with or without the /v1 of OpenAI's clients."""
        url = urlsplit(base_url)
        is_tls = url.scheme == "https"
        _, connection = await asyncio.get_running_loop().create_connection(
            cls,
            url.hostname or "127.0.0.1",
            url.port or (443 if is_tls else 80),
            ssl=is_tls or None,
        )
        connection._host = url.netloc
        connection._prefix = url.path.rstrip("/").removesuffix("/v1")
        return connection

    async def call(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        keep_reply: bool = False,
    ) -> Outcome:
        """Streams one answer. Raises `ServerLostError`; HTTP and SSE errors are part of the
        outcome."""
        payload = json.dumps(
            {**body, "stream": True, "stream_options": {"include_usage": True}}
        ).encode()
        lines = [
            f"POST {self._prefix}{path} HTTP/1.1",
            f"host: {self._host}",
            "content-type: application/json",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append(f"content-length: {len(payload)}\r\n\r\n")
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._outcome = Outcome(time.monotonic())
        self._tail = b""
        self._body = bytearray()
        self._keep_body = keep_reply
        assert self._transport is not None
        self._transport.write("\r\n".join(lines).encode() + payload)
        await self._done
        self._settle()
        return self._outcome

    @property
    def has_begun(self) -> bool:
        """Whether a part of the current answer has come."""
        return bool(self._outcome.first_at)

    @property
    def num_pieces(self) -> int:
        """Number of pieces of the current answer."""
        return len(self._outcome.gaps)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # Callbacks of asyncio and the parser.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ServerLostError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, chunk: bytes) -> None:
        now = time.monotonic()
        outcome = self._outcome
        if self._keep_body or not outcome.first_at:
            self._body += chunk
        if not outcome.first_at:
            if not any(_text_of(event) for event in _events(bytes(self._body))):
                self._tail = (self._tail + chunk)[-4096:]
                return
            outcome.first_at = outcome.last_at = now
        elif b'"choices":[{' in chunk or b'"choices": [{' in chunk:
            outcome.gaps.append(now - outcome.last_at)
            outcome.last_at = now
        self._tail = (self._tail + chunk)[-4096:]

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _settle(self) -> None:
        """Reads usage and errors from the end of an answer that has ended."""
        outcome = self._outcome
        status = self._parser.get_status_code()
        outcome.last_at = outcome.last_at or time.monotonic()
        if status != 200:
            outcome.error = (
                f"HTTP {status}: {bytes(self._body or self._tail)[:200].decode(errors='replace')}"
            )
            return
        for event in _events(self._tail):
            if usage := event.get("usage"):
                outcome.prompt_tokens = usage["prompt_tokens"]
                outcome.completion_tokens = usage["completion_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get(
                    "cached_tokens", 0
                )
            if "error" in event:
                outcome.error = str(event["error"])
        if not outcome.completion_tokens and outcome.first_at:
            # The server reports no usage: one token an event is the best guess.
            outcome.completion_tokens = len(outcome.gaps) + 1
        if not self._tail.rstrip().endswith(b"data: [DONE]") and not outcome.error:
            outcome.error = "the stream ended without [DONE]"
        if self._keep_body:
            outcome.reply = "".join(_text_of(event) for event in _events(bytes(self._body)))


def _events(data: bytes) -> list[dict[str, Any]]:
    """The whole JSON events in a stretch of a stream; a cut one at either end is left out."""
    events = []
    for part in data.split(b"\n\n"):
        _, _, payload = part.rpartition(b"data: ")
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(payload)
            if isinstance(event, dict):
                events.append(event)
    return events


def _text_of(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
