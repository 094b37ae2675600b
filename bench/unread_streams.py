"""Measures a neighbour's time to first token beside streams whose clients do not read, on a simulated engine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Annotated
from urllib.parse import urlsplit

import numpy as np
import typer

from headwater.bench.own_line import own_line
from headwater.bench.program import run_program
from headwater.bench.sse_client import SseConnection
from headwater.services.stack.line_file import LineRecord

SMALL_BUFFER = 4096
"""Of a socket that is not read: what the system would take in the client's place is not read either."""


async def first_tokens(line: LineRecord, count: int) -> list[float]:
    """Seconds to the first token of short chats, one after another."""
    connection = await SseConnection.open(line.rest)
    body = {"model": line.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    found = []
    for _ in range(count):
        outcome = await connection.call("/v1/chat/completions", body, {})
        if outcome.error:
            raise typer.BadParameter(outcome.error)
        found.append(outcome.ttft)
    connection.close()
    return found


def open_unread(line: LineRecord, max_tokens: int) -> socket.socket:
    """A stream whose client asks and reads nothing."""
    url = urlsplit(line.rest)
    asked = {"model": line.model, "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    deaf.connect((url.hostname, url.port))
    lines = ("POST /v1/completions HTTP/1.1", f"host: {url.netloc}", "content-type: application/json")
    deaf.sendall("\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body)
    return deaf


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(seconds, q)), 4) for q in (50, 90, 100)}


def main(
    streams: Annotated[int, typer.Option(help="whose clients do not read")] = 300,
    max_tokens: Annotated[int, typer.Option(help="of each of them")] = 4000,
    neighbours: Annotated[int, typer.Option(help="short chats beside them, one after another")] = 30,
) -> None:
    """Percentiles of the neighbour's first token alone and beside the streams; as JSON."""
    os.environ["HEADWATER_MAX_NUM_SEQS"] = str(2 * streams)
    os.environ["HEADWATER_NUM_BLOCKS"] = str(2 * streams * max_tokens // 16)
    with own_line(["--executor=simulated", "--replicas=1", "--log-level=error"]) as (line, _):
        alone = asyncio.run(first_tokens(line, neighbours))
        unread = [open_unread(line, max_tokens) for _ in range(streams)]
        beside = asyncio.run(first_tokens(line, neighbours))
        for each in unread:
            each.close()
    print(json.dumps({"streams": streams, "alone": percentiles(alone), "beside": percentiles(beside)}))


if __name__ == "__main__":
    run_program(main)
