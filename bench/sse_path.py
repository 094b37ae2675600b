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
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import grpc
import typer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headwater.proto import engine_pb2, events_pb2, output_processor_pb2, processor_pb2
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.manifest import ModelManifest
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.channel import server_options
from headwater.services.runtime.prober import SERVICES
from headwater.services.runtime.process import READY_FD, run_stage
from headwater.services.runtime.progress import silent
from headwater.services.runtime.served_model import ServedModel

from .figures import AsJson, show_figures
from .processes import cpu_seconds
from .program import run_program
from .synthetic_publishers import MODEL

REPLICA = "synthetic"
WORDS = (" the", " river", " runs", " “down”", " to", "\n", " sea", ",")
WARM_UP_SECONDS = 1.0
LONG = 10**6
"""Number of tokens of an answer: no stream ends while it is measured."""
Frame = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures. Rates are over the whole measured time; an event carries one token."""

    num_streams: int
    tokens_per_second: int
    gateway_cpu_seconds_per_1000_tokens: float
    output_processor_cpu_seconds_per_1000_tokens: float | None
    tokens_per_cpu_second: int
    """Tokens per CPU second of both stages together."""


class Streams:
    """Streams that the other end of a session opened, with the position of each."""

    def __init__(self) -> None:
        self.credit: dict[int, int] = {}
        self.sent: dict[int, int] = {}

    async def follow(self, frames: AsyncIterator[Any]) -> None:
        async for frame in frames:
            for add in (
                [opened.add for opened in frame.opens] if hasattr(frame, "opens") else frame.adds
            ):
                for stream_id in add.stream_ids:
                    self.credit[stream_id] = add.credit
                    self.sent[stream_id] = 0
            for more in frame.credits:
                if more.stream_id in self.credit:
                    self.credit[more.stream_id] += more.tokens
            for cancel in frame.cancels:
                self.credit.pop(cancel.stream_id, None)
                self.sent.pop(cancel.stream_id, None)

    def advance(self) -> tuple[list[int], list[int]]:
        """Adds a token to every stream that has credit; returns the streams and the tokens'
        indices."""
        rows = [stream_id for stream_id, left in self.credit.items() if left > 0]
        first = [self.sent[stream_id] for stream_id in rows]
        for stream_id in rows:
            self.credit[stream_id] -= 1
            self.sent[stream_id] += 1
        return rows, first


def text_frame(step: int, rows: list[int], first: list[int]) -> Frame:
    """Frame as an output processor sends it."""
    return output_processor_pb2.OutputFrame(
        stream_ids=rows,
        first_index=first,
        num_tokens=[1] * len(rows),
        token_ids=[step % 1000] * len(rows),
        texts=[WORDS[step % len(WORDS)]] * len(rows),
        text_offset=first,
    )


def token_frame(step: int, rows: list[int], first: list[int]) -> Frame:
    """Frame as an engine sends it."""
    token_ids = random.choices(range(300, 20_000), k=len(rows))
    return engine_pb2.EngineFrame(
        step=step,
        stream_ids=rows,
        first_index=first,
        num_tokens=[1] * len(rows),
        token_ids=token_ids,
    )


def session(
    make: Callable[[int, list[int], list[int]], Frame],
) -> Callable[[Any, Any], AsyncIterator[Frame]]:
    """Handler of a Session that sends frames as fast as they are taken."""

    async def carry(incoming: AsyncIterator[Any], context: Any) -> AsyncIterator[Frame]:
        streams = Streams()
        reader = asyncio.create_task(streams.follow(incoming))
        try:
            for step in range(sys.maxsize):
                rows, first = streams.advance()
                if rows:
                    yield make(step, rows, first)
                await asyncio.sleep(0 if rows else 0.001)
        finally:
            reader.cancel()

    return carry


class Stages:
    """All stages behind the gateway, without text or model."""

    def __init__(
        self, model: ServedModel, text_session: Callable[[Any, Any], AsyncIterator[Frame]]
    ) -> None:
        self._model = model
        self._text_session = text_session
        self.address = ""

    async def list_models(self, request: Any, context: Any) -> processor_pb2.ProcessorModelsReply:
        return processor_pb2.ProcessorModelsReply(models=[self._model.to_pb()])

    async def prepare(
        self, request: processor_pb2.PrepareRequest, context: Any
    ) -> processor_pb2.PrepareReply:
        request.sampling.n = 1
        return processor_pb2.PrepareReply(
            prompt_ids=range(16), sampling=request.sampling, block_size=16
        )

    async def prepare_session(
        self, incoming: AsyncIterator[processor_pb2.PrepareFrame], context: Any
    ) -> AsyncIterator[processor_pb2.PreparedFrame]:
        await context.send_initial_metadata(())
        async for frame in incoming:
            yield processor_pb2.PreparedFrame(
                calls=[
                    processor_pb2.PreparedCall(
                        id=call.id, reply=await self.prepare(call.request, context)
                    )
                    for call in frame.calls
                ]
            )

    async def info(self, request: Any, context: Any) -> events_pb2.Member:
        return events_pb2.Member(
            kind=events_pb2.Member.KIND_ENGINE,
            incarnation=events_pb2.Incarnation(replica_id=REPLICA, epoch=1),
            address=self.address,
            model=self._model.to_pb(),
            model_key=self._model.key,
            load=events_pb2.Load(num_total_blocks=1 << 20),
        )

    async def kv_snapshot(
        self, request: Any, context: Any
    ) -> AsyncIterator[engine_pb2.KvSnapshotPart]:
        incarnation = events_pb2.Incarnation(replica_id=REPLICA, epoch=1)
        yield engine_pb2.KvSnapshotPart(incarnation=incarnation, last=True)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the services. NOTE: generic handlers, since two of the services have a method of one
        name."""
        unary = grpc.unary_unary_rpc_method_handler
        stream = grpc.unary_stream_rpc_method_handler
        both = grpc.stream_stream_rpc_method_handler
        services: dict[str, dict[str, tuple[Any, Any, Any]]] = {
            "Processor": {
                "ListModels": (unary, self.list_models, processor_pb2.ProcessorModelsRequest),
                "Prepare": (unary, self.prepare, processor_pb2.PrepareRequest),
                "PrepareSession": (both, self.prepare_session, processor_pb2.PrepareFrame),
            },
            "OutputProcessor": {
                "Session": (both, self._text_session, output_processor_pb2.GatewayFrame)
            },
            "Engine": {
                "Session": (both, session(token_frame), engine_pb2.ClientFrame),
                "Info": (unary, self.info, engine_pb2.InfoRequest),
                "KvSnapshot": (stream, self.kv_snapshot, engine_pb2.KvSnapshotRequest),
            },
        }
        for name, methods in services.items():
            handlers = {
                method: kind(handler, request.FromString, lambda reply: reply.SerializeToString())
                for method, (kind, handler, request) in methods.items()
            }
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"headwater.v1.{name}", handlers),)
            )


async def serve_stages(stages: Stages) -> None:
    """The role `stages`: writes its address to standard output and serves until it is killed."""
    server = grpc.aio.server(options=server_options())
    healthy = health.aio.HealthServicer()
    stages.add_to(server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    stages.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    for service in SERVICES.values():
        await healthy.set(service, health_pb2.HealthCheckResponse.SERVING)
    print(stages.address, flush=True)
    await server.wait_for_termination()


def served(name: str) -> ServedModel:
    return replace(
        MODEL, name=name, revision="r0", block_size=16, max_model_len=2 * LONG, vocab_size=49152
    )


class Counter(asyncio.Protocol):
    """A client that reads one stream and counts its events."""

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
        behind = said(start(running, _role("stages", model)))
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
        said(client)
        counted = [process.pid for process in (gateway, output_processor) if process is not None]
        before = [cpu_seconds(pid) for pid in counted]
        began = time.perf_counter()
        rate = float(said(client))
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


def said(process: subprocess.Popen[str]) -> str:
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
