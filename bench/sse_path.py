"""Measures the cost of a token between an engine's frame and the client's socket: output processor
and gateway.

`python -m headwater.bench.sse_path`: real processes of both, fed by a synthetic engine (one row a
stream and step, as fast as credit allows) and read by a client that only counts. With
`--gateway-only` the output processor is synthetic too. The CPU time of synthetic parts is not
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.manifest import ModelManifest
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.process import READY_FD, run_stage
from headwater.services.runtime.progress import silent
from headwater.services.runtime.served_model import ServedModel

from .figures import AsJson, show_figures
from .processes import cpu_seconds
from .program import run_program
from .sse_stages import Stages, serve_stages, session, text_frame
from .synthetic_publishers import MODEL

WARM_UP_SECONDS = 1.0
LONG = 10**6
"""Number of tokens of an answer: no stream ends while it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures. Rates are over the whole measured time; an event carries one token."""

    num_streams: int
    tokens_per_second: int
    gateway_cpu_seconds_per_1000_tokens: float
    output_processor_cpu_seconds_per_1000_tokens: float | None
    tokens_per_cpu_second: int
    """Tokens per CPU second of both stages together."""


def served(name: str) -> ServedModel:
    return replace(
        MODEL, name=name, revision="r0", block_size=16, max_model_len=2 * LONG, vocab_size=49152
    )


class Counter(asyncio.Protocol):
    """Client that reads one stream and counts its events."""

    num_events = 0

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        Counter.num_events += data.count(b"data: ")


async def read_streams(model: str, address: str, num_streams: int, seconds: float) -> None:
    """The role `client`: opens the streams and writes the rate of events as JSON."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "go"}],
            "stream": True,
            "max_tokens": LONG,
        }
    )
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
    )
    head = "\r\n".join((*lines, f"Content-Length: {len(body)}"))
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    for _ in range(num_streams):
        await loop.create_connection(
            lambda: Counter(f"{head}\r\n\r\n{body}".encode()), host, int(port)
        )
    await asyncio.sleep(WARM_UP_SECONDS)
    print("warm", flush=True)
    began = time.perf_counter()
    events = Counter.num_events
    await asyncio.sleep(seconds)
    print(json.dumps((Counter.num_events - events) / (time.perf_counter() - began)), flush=True)


def measure(model: str, folder: Path | None, num_streams: int, seconds: float) -> Measurement:
    """Starts the processes, measures, ends them. `folder`: the real output processor's tokenizer;
    None: synthetic."""
    with contextlib.ExitStack() as running:
        behind = first_line_of(start(running, _role("stages", model)))
        text = behind
        output_processor = None
        if folder is not None:
            flags = [f"--model-folder={folder}", "--metrics-port=-1", "--log-level=warning"]
            output_processor, addresses = stage(
                running, "headwater.services.output_processor", flags
            )
            text = addresses["grpc"]
        flags = ["--port=0", "--grpc-port=0", "--log-level=warning"]
        flags += [f"--processor={behind}", f"--output-processor={text}", f"--replica={behind}"]
        gateway, addresses = stage(running, "headwater.gateway", flags)
        time.sleep(WARM_UP_SECONDS)
        client = start(running, _role("client", model, addresses["rest"], num_streams, seconds))
        first_line_of(client)
        counted = [process.pid for process in (gateway, output_processor) if process is not None]
        before = [cpu_seconds(pid) for pid in counted]
        began = time.perf_counter()
        rate = float(first_line_of(client))
        elapsed = time.perf_counter() - began
        cpu = [cpu_seconds(pid) - spent for pid, spent in zip(counted, before, strict=True)]
    per_thousand = [round(spent / (rate * elapsed) * 1000, 5) for spent in cpu]
    return Measurement(
        num_streams=num_streams,
        tokens_per_second=round(rate),
        gateway_cpu_seconds_per_1000_tokens=per_thousand[0],
        output_processor_cpu_seconds_per_1000_tokens=per_thousand[1]
        if folder is not None
        else None,
        tokens_per_cpu_second=round(rate * elapsed / sum(cpu)),
    )


def _role(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", __spec__.name, name, *map(str, arguments)]


def stage(
    running: contextlib.ExitStack, module: str, flags: list[str]
) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Starts a real stage; returns its process and its address."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", module, *flags]
    env = os.environ | {READY_FD: str(write_end)}
    process = start(running, command, pass_fds=(write_end,), env=env)
    os.close(write_end)
    with os.fdopen(read_end) as ready:
        return process, json.loads(ready.readline())["addresses"]


def start(running: contextlib.ExitStack, command: list[str], **how: Any) -> subprocess.Popen[str]:
    process = running.enter_context(
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how)
    )
    running.callback(process.kill)
    return process


def first_line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main(
    num_streams: Annotated[int, typer.Option("--streams", help="streams that run at once")] = 256,
    seconds: Annotated[float, typer.Option(help="of each round")] = 5.0,
    rounds: Annotated[int, typer.Option(help="the median round is shown")] = 3,
    gateway_only: Annotated[
        bool, typer.Option("--gateway-only", help="with a synthetic output processor")
    ] = False,
    model: Annotated[str, typer.Option(help="whose tokenizer makes the text")] = DEMO_NAME,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of a token between an engine's frame and the client's socket."""
    folder = None if gateway_only else pull(model, cache_dir=default_cache_dir(), progress=silent)
    name = model if folder is None else ModelManifest.read(folder).name
    taken = [measure(name, folder, num_streams, seconds) for _ in range(rounds)]
    median = sorted(taken, key=lambda each: each.tokens_per_cpu_second)[rounds // 2]
    show_figures(asdict(median), "from engine frames to SSE bytes", as_json=as_json)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stages", name]:
            run_stage(serve_stages(Stages(served(name), session(text_frame))))
        case ["client", name, address, streams, duration]:
            run_stage(read_streams(name, address, int(streams), float(duration)))
        case _:
            run_program(main)
