"""One streamed answer of an OpenAI-compatible server. Where its events have numbers it outlives its
connection.

A gateway that dies, restarts or is told to leave costs a pause: the rest is asked for by the
stream's id, until it comes or its time is over. Knows nothing about conversations.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

PATIENCE_SECONDS = 20.0
"""Seconds for which a server may be out of reach; it keeps a stream that nobody reads a little
shorter."""
PAUSE_SECONDS = 0.25
LEAVING = "draining"
"""Error code of a gateway that shuts down and ends its streams; another gateway continues them."""
WANTS_RECEIPT = {"x-headwater-receipt": "1"}
"""Other servers pass over it."""
Chunk = dict[str, Any]


class ChatError(Exception):
    """The server refused or ended an answer; its own sentence."""


class _AskAgain(ChatError):
    """Another gateway, or the same one later, may go on with the answer."""


class AnswerStream:
    """Use once: `chunks`."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        self._client = client
        self._body = body
        self._id = ""
        self._last = 0
        """Id of the stream, and number of the last event that came whole; 0: none came."""
        self._broke_at: float | None = None

    def chunks(self) -> Iterator[Chunk]:
        """Raises `ChatError`, or what the connection raised that cannot be mended. Leaving early
        ends the answer."""
        has_ended = False
        opening = self._client.stream(
            "POST", "chat/completions", json=self._body, headers=WANTS_RECEIPT
        )
        try:
            while not has_ended:
                try:
                    with opening as reply:
                        yield from self._events(reply)
                    has_ended = True
                except (httpx.TransportError, _AskAgain):
                    self._broke_at = self._broke_at or time.monotonic()
                    if not self._last or time.monotonic() - self._broke_at > PATIENCE_SECONDS:
                        raise
                    time.sleep(PAUSE_SECONDS)
                    headers = {"Last-Event-ID": str(self._last)}
                    opening = self._client.stream("GET", f"streams/{self._id}", headers=headers)
        except GeneratorExit:
            self._give_up()
            raise

    def _events(self, reply: httpx.Response) -> Iterator[Chunk]:
        if reply.is_error:
            reply.read()
            refusal = (
                _AskAgain if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE else ChatError
            )
            raise refusal(sentence_of(reply))
        number = 0
        for line in reply.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line == "data: [DONE]":
                return
            elif line.startswith("data: "):
                chunk: Chunk = json.loads(line[6:])
                if "error" in chunk:
                    is_leaving = chunk["error"].get("code") == LEAVING
                    raise (_AskAgain if is_leaving else ChatError)(chunk["error"]["message"])
                self._last, self._id, self._broke_at = number, chunk.get("id", self._id), None
                yield chunk

    def _give_up(self) -> None:
        """Ends the stream at the server, which need not keep it for anybody."""
        if not self._last:
            return
        with contextlib.suppress(httpx.TransportError):
            self._client.delete(f"streams/{self._id}")


def sentence_of(reply: httpx.Response) -> str:
    """Message of an error reply, with a hint where to put a missing key."""
    try:
        message = str(reply.json()["error"]["message"])
        is_without_key = reply.status_code == httpx.codes.UNAUTHORIZED
        return f"{message}; give --api-key, or set HEADWATER_API_KEY" if is_without_key else message
    except (ValueError, KeyError, TypeError):
        return f"{reply.url} answered {reply.status_code}"
