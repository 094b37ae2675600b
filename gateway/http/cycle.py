"""One request and its response on a connection: uvicorn's, but for how the response is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

WITHOUT_BODY = (204, 304)


class Cycle(RequestResponseCycle):
    """Writes the head of a response together with the first piece of its body: a write costs more
    than all else about a short response, and wakes the client."""

    _head = b""
    """Head that is not written yet."""

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if self.response_complete:
            raise RuntimeError(f"{message['type']} behind the end of a response")
        if not self.response_started:
            self.response_started = True
            self.waiting_for_100_continue = False
            self._head = self._head_of(message["status"], message.get("headers", ()))
            return
        more_body = message.get("more_body", False)
        self.transport.write(self._head + self._framed(message.get("body", b""), more_body))
        self._head = b""
        if not more_body:
            self._end()

    def _head_of(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Raises `RuntimeError` for a header that would be read as several."""
        lines = [STATUS_LINE[status][:-2]]
        has_connection_close = False
        for name, value in (*self.default_headers, *headers):
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"connection" and value.strip().lower() == b"close":
                self.keep_alive = False
                has_connection_close = True
            lines.append(b"%b: %b" % (name, value))
        if not self.keep_alive and not has_connection_close:
            lines.append(b"connection: close")
        if self.chunked_encoding is None and not self._is_bare(status):
            # Its length is not known.
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join((*lines, b"", b""))
        num_lines = len(lines) + 1
        if not head.count(b"\n") == head.count(b"\r") == num_lines or b"\0" in head:
            raise RuntimeError("a header of the response has an end of line in it")
        return head

    def _is_bare(self, status: int) -> bool:
        """Whether the response has no body, whatever its length is."""
        return self.scope["method"] == "HEAD" or status in WITHOUT_BODY

    def _framed(self, body: bytes, more_body: bool) -> bytes:
        """A piece of the body as it is written. Raises `RuntimeError` for a body that has another
        length than its header says."""
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            return b""
        if self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk if more_body else chunk + b"0\r\n\r\n"
        self.expected_content_length -= len(body)
        if self.expected_content_length < 0:
            raise RuntimeError("the content of a response is longer than its header says")
        if self.expected_content_length and not more_body:
            raise RuntimeError("the content of a response is shorter than its header says")
        return body

    def _end(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
