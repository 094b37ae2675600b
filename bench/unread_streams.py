"""Measures a neighbour's time to first token alone, beside streams that are read, and beside
streams that are not, on a simulated engine; and the stages' work while no stream is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

import numpy as np
import typer

from headwater.services.stack.cluster_record import ClusterRecord

from .own_cluster import engine_metrics, own_cluster
from .processes import cpu_seconds
from .program import run_program
from .sse_client import SseConnection

SMALL_BUFFER = 4096
"""Size of the buffer of a socket that is not read: data that the system takes in the client's place
is not read either."""
QUIET_SECONDS = 5.0
"""Seconds for which stages are watched while no stream is read."""
STANDSTILL_SECONDS = 90.0
"""Seconds within which streams without a reader have to stand still."""
LOOK_SECONDS = 3.0
"""Seconds between two reads of the number of computed tokens; a busy engine reports it late."""
_TOKENS = re.compile(r"^headwater_generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)


async def first_tokens(cluster: ClusterRecord, count: int) -> list[float]:
    """Seconds to the first token of short chats, one after another."""
    connection = await SseConnection.open(cluster.rest)
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
    }
    found = []
    for _ in range(count):
        outcome = await connection.call("/v1/chat/completions", body, {})
        if outcome.error:
            raise typer.BadParameter(outcome.error)
        found.append(outcome.ttft)
    connection.close()
    return found


def open_stream(cluster: ClusterRecord, max_tokens: int, buffer: int | None) -> socket.socket:
    """Opens a stream without reading it; `buffer`: size of the socket's receive buffer."""
    url = urlsplit(cluster.rest)
    asked = {
        "model": cluster.model,
        "prompt": "Once",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect((url.hostname, url.port))
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"host: {url.netloc}",
        "content-type: application/json",
    )
    client.sendall("\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body)
    return client


@contextlib.contextmanager
def unread_streams(cluster: ClusterRecord, count: int, max_tokens: int) -> Iterator[None]:
    """Opens streams whose clients read nothing, inside the `with` block."""
    with contextlib.ExitStack() as scope:
        for _ in range(count):
            scope.enter_context(open_stream(cluster, max_tokens, SMALL_BUFFER))
        yield


@contextlib.contextmanager
def read_streams(cluster: ClusterRecord, count: int, max_tokens: int) -> Iterator[None]:
    """Context with `count` streams that another process reads as fast as they come; they run when
    it begins."""
    before = num_tokens(cluster)
    reader = multiprocessing.get_context("spawn").Process(
        target=_read_all, args=(cluster, count, max_tokens)
    )
    reader.start()
    try:
        while num_tokens(cluster) < before + count:
            time.sleep(0.1)
        yield
    finally:
        reader.terminate()
        reader.join()


def _read_all(cluster: ClusterRecord, count: int, max_tokens: int) -> None:
    ready = selectors.DefaultSelector()
    for _ in range(count):
        ready.register(open_stream(cluster, max_tokens, None), selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.recv(1 << 18)


def num_tokens(cluster: ClusterRecord) -> float:
    """Number of tokens that the engine has computed."""
    [text] = engine_metrics(cluster)
    return sum(map(float, _TOKENS.findall(text)))


def wait_for_standstill(cluster: ClusterRecord) -> None:
    """Waits until streams without a reader stand still. Raises `BadParameter` where they go on."""
    before = -1.0
    end = time.monotonic() + STANDSTILL_SECONDS
    while (now := num_tokens(cluster)) != before:
        if time.monotonic() > end:
            raise typer.BadParameter("the streams do not stand still")
        before = now
        time.sleep(LOOK_SECONDS)


def cpu_shares(cluster: ClusterRecord, seconds: float) -> dict[str, float]:
    """The share of a core that each stage uses; an engine's core process is a stage of its own."""
    pids = {stage.name: stage.pid for stage in cluster.stages}
    for stage in cluster.stages:
        pids |= {f"{stage.name}'s {rank}": pid for rank, pid in enumerate(stage.children, 1)}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    return {
        name: round((cpu_seconds(pid) - before[name]) / seconds, 3) for name, pid in pids.items()
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(seconds, q)), 4) for q in (50, 90, 99, 100)}


def main(
    streams: Annotated[int, typer.Option(help="whose clients do not read")] = 300,
    max_tokens: Annotated[int, typer.Option(help="of each of them")] = 4000,
    neighbours: Annotated[
        int, typer.Option(help="short chats beside them, one after another")
    ] = 30,
    seats: Annotated[
        int | None, typer.Option(help="of the engine (default: twice the streams)")
    ] = None,
    *,
    read: Annotated[
        bool, typer.Option(help="measure beside as many streams that are read, too")
    ] = True,
) -> None:
    """Percentiles of the neighbour's first token alone, beside streams that are read, beside
    streams that are not, from their first moment on and once they stand still; and the stages' CPU
    time then. As JSON."""
    os.environ["HEADWATER_MAX_NUM_SEQS"] = str(seats or 2 * streams)
    os.environ["HEADWATER_NUM_BLOCKS"] = str(2 * streams * max_tokens // 16)
    found: dict[str, object] = {"streams": streams}
    with own_cluster(["--executor=simulated", "--replicas=1", "--log-level=error"]) as (cluster, _):

        def measure(name: str) -> None:
            found[name] = percentiles(asyncio.run(first_tokens(cluster, neighbours)))

        measure("alone")
        with unread_streams(cluster, streams, max_tokens):
            measure("beside_unread")
            wait_for_standstill(cluster)
            found["cpu_at_standstill"] = cpu_shares(cluster, QUIET_SECONDS)
            measure("at_standstill")
        if read:
            wait_for_standstill(cluster)
            with read_streams(cluster, streams, max_tokens):
                measure("beside_read")
    print(json.dumps(found | {"load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    run_program(main)
