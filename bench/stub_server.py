"""A server that answers every streamed completion with made-up pieces at once: the ceiling of a
load generator.

Run `python -m headwater.bench.stub_server --port 9000` beside `headwater bench serve --base-url
http://127.0.0.1:9000`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Annotated, Any, cast

import httptools
import typer
import uvloop

from .program import run_program

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


MODELS = b'{"object":"list","data":[{"id":"stub","object":"model"}]}'
LISTED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(MODELS),
    MODELS,
)


class StubConnection(asyncio.Protocol):
    """One client connection; each piece of an answer is written separately, as by a real server's
    steps."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, chunk: bytes) -> None:
        self._body += chunk

    def on_message_complete(self) -> None:
        body = self._body
        self._body = b""
        self._parser = httptools.HttpRequestParser(self)
        if not body:
            # A request without a body asks for the list of models.
            self._transport.write(LISTED)
            return
        request = json.loads(body)
        self._transport.write(HEAD)
        self._pieces_left = self._num_tokens = request["max_tokens"]
        asyncio.get_running_loop().call_soon(self._write_piece)

    def _write_piece(self) -> None:
        if self._transport.is_closing():
            return
        if self._pieces_left:
            self._pieces_left -= 1
            self._write_event({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
            asyncio.get_running_loop().call_soon(self._write_piece)
            return
        usage = {"prompt_tokens": 1, "completion_tokens": self._num_tokens}
        self._write_event({"choices": [], "usage": usage})
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _write_event(self, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _serve(port: int) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    server = await asyncio.get_running_loop().create_server(StubConnection, sock=listener)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await server.serve_forever()


def main(
    port: Annotated[int, typer.Option(help="0: any free one")] = 0,
    processes: Annotated[int, typer.Option(help="processes that share the port")] = 1,
) -> None:
    """Answer every completion at once."""
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    uvloop.run(_serve(port))


if __name__ == "__main__":
    run_program(main)
