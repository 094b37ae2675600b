"""Measures what a token costs the gateway between an output processor's frame and the client's socket.

`python -m headwater.bench.sse_path`: a real gateway process, fed by a synthetic output processor (one row a stream
and step, as fast as credit allows) and read by a client that only counts. Their CPU is not the gateway's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import grpc
import typer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from headwater.proto import engine_pb2, engine_pb2_grpc, events_pb2, processor_pb2, processor_pb2_grpc
from headwater.proto import output_processor_pb2 as out_pb2
from headwater.proto import output_processor_pb2_grpc as out_pb2_grpc
from headwater.services.runtime import READY_FD, run_stage
from headwater.services.served_model import ServedModel

MODEL = ServedModel(
    name="synthetic",
    revision="r0",
    dtype="bfloat16",
    block_size=16,
    kv_format="bfloat16",
    max_model_len=1 << 20,
    vocab_size=49152,
)
WORDS = (" the", " river", " runs", " “down”", " to", "\n", " sea", ",")
WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Rates are over the whole measured time."""

    num_streams: int
    tokens_per_second: float
    events_per_second: float
    gateway_cpu_seconds_per_1000_tokens: float
    tokens_per_gateway_cpu_second: float


class Stages(
    processor_pb2_grpc.ProcessorServicer, out_pb2_grpc.OutputProcessorServicer, engine_pb2_grpc.EngineServicer
):
    """Everything behind the gateway, without text or model."""

    def __init__(self, steps_per_second: float) -> None:
        self.address = ""
        self._pause = 1 / steps_per_second if steps_per_second else 0.0

    async def ListModels(self, request: Any, context: Any) -> processor_pb2.ProcessorModelsReply:
        return processor_pb2.ProcessorModelsReply(models=[MODEL.to_pb()])

    async def Prepare(self, request: processor_pb2.PrepareRequest, context: Any) -> processor_pb2.PrepareReply:
        request.sampling.n = 1
        request.sampling.max_tokens = request.sampling.max_tokens or 16
        return processor_pb2.PrepareReply(prompt_ids=range(16), sampling=request.sampling, block_size=16)

    async def Info(self, request: Any, context: Any) -> events_pb2.Member:
        return events_pb2.Member(
            kind=events_pb2.Member.KIND_ENGINE,
            incarnation=events_pb2.Incarnation(replica_id="synthetic", epoch=1),
            address=self.address,
            model=MODEL.to_pb(),
            model_key=MODEL.key,
            load=events_pb2.Load(num_total_blocks=1 << 20),
        )

    async def KvSnapshot(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.KvSnapshotPart]:
        incarnation = events_pb2.Incarnation(replica_id="synthetic", epoch=1)
        yield engine_pb2.KvSnapshotPart(incarnation=incarnation, last=True)

    async def KvEvents(self, request: Any, context: Any) -> AsyncIterator[events_pb2.KvEventBatch]:
        for _ in ():
            yield events_pb2.KvEventBatch()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[out_pb2.OutputFrame]:
        """NOTE: both session services have a method of this name; only the output processor's is registered."""
        credit: dict[int, int] = {}
        sent: dict[int, int] = {}
        reader = asyncio.create_task(_read(request_iterator, credit, sent))
        try:
            for step in range(sys.maxsize):
                began = time.perf_counter()
                if (frame := _frame(step, credit, sent)) is not None:
                    yield frame
                await asyncio.sleep(max(0.0, self._pause - (time.perf_counter() - began)) if sent else 0.001)
        finally:
            reader.cancel()


async def _read(frames: Any, credit: dict[int, int], sent: dict[int, int]) -> None:
    async for frame in frames:
        for opened in frame.opens:
            for stream_id in opened.add.stream_ids:
                credit[stream_id], sent[stream_id] = opened.add.credit, 0
        for more in frame.credits:
            if more.stream_id in credit:
                credit[more.stream_id] += more.tokens
        for cancel in frame.cancels:
            credit.pop(cancel.stream_id, None)
            sent.pop(cancel.stream_id, None)


def _frame(step: int, credit: dict[int, int], sent: dict[int, int]) -> out_pb2.OutputFrame | None:
    rows = [stream_id for stream_id, left in credit.items() if left > 0]
    if not rows:
        return None
    first = [sent[stream_id] for stream_id in rows]
    for stream_id in rows:
        credit[stream_id] -= 1
        sent[stream_id] += 1
    word = WORDS[step % len(WORDS)]
    return out_pb2.OutputFrame(
        stream_ids=rows,
        first_index=first,
        num_tokens=[1] * len(rows),
        token_ids=[step % 49152] * len(rows),
        texts=[word] * len(rows),
        text_offset=first,
    )


async def serve_stages(steps_per_second: float) -> None:
    """The role `stages`: writes its address to standard output and serves until it is killed."""
    server, stages, healthy = grpc.aio.server(), Stages(steps_per_second), health.aio.HealthServicer()
    processor_pb2_grpc.add_ProcessorServicer_to_server(stages, server)
    engine_pb2_grpc.add_EngineServicer_to_server(stages, server)
    out_pb2_grpc.add_OutputProcessorServicer_to_server(stages, server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    stages.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    print(stages.address, flush=True)
    await server.wait_for_termination()


class Counter(asyncio.Protocol):
    """A client that reads one stream and counts its events."""

    num_events = 0

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        Counter.num_events += data.count(b"data: ")


async def read_streams(address: str, num_streams: int, seconds: float) -> None:
    """The role `client`: opens the streams and writes the rate of events as JSON."""
    body = json.dumps(
        {"model": MODEL.name, "messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": 10**6}
    )
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: bench", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(body)}"))
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    for _ in range(num_streams):
        await loop.create_connection(lambda: Counter(f"{head}\r\n\r\n{body}".encode()), host, int(port))
    await asyncio.sleep(WARM_UP_SECONDS)
    print("warm", flush=True)
    began, events = time.perf_counter(), Counter.num_events
    await asyncio.sleep(seconds)
    print(json.dumps((Counter.num_events - events) / (time.perf_counter() - began)), flush=True)


def measure(num_streams: int, seconds: float, steps_per_second: float) -> Measurement:
    """Starts the three processes, measures, ends them."""
    with contextlib.ExitStack() as running:
        stages = _start(running, [sys.executable, "-m", __spec__.name, "stages", str(steps_per_second)])
        behind = _line(stages)
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "headwater.gateway", "--port=0", "--grpc-port=0", "--log-level=warning"]
        command += [f"--{flag}={behind}" for flag in ("processor", "output-processor", "replica")]
        gateway = _start(running, command, pass_fds=(write_end,), env=os.environ | {READY_FD: str(write_end)})
        os.close(write_end)
        with os.fdopen(read_end) as ready:
            rest = json.loads(ready.readline())["addresses"]["rest"]
        time.sleep(WARM_UP_SECONDS)
        client = _start(running, [sys.executable, "-m", __spec__.name, "client", rest, str(num_streams), str(seconds)])
        _line(client)
        cpu, began = _cpu_seconds(gateway.pid), time.perf_counter()
        events_per_second = float(_line(client))
        cpu, elapsed = _cpu_seconds(gateway.pid) - cpu, time.perf_counter() - began
    tokens = events_per_second * elapsed
    return Measurement(
        num_streams=num_streams,
        tokens_per_second=round(events_per_second),
        events_per_second=round(events_per_second),
        gateway_cpu_seconds_per_1000_tokens=round(cpu / tokens * 1000, 5),
        tokens_per_gateway_cpu_second=round(tokens / cpu),
    )


def _start(running: contextlib.ExitStack, command: list[str], **how: Any) -> subprocess.Popen[str]:
    process = running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how))
    running.callback(process.kill)
    return process


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(
    num_streams: Annotated[int, typer.Option("--streams", help="streams that run at once")] = 256,
    seconds: Annotated[float, typer.Option(help="of each round")] = 5.0,
    rounds: Annotated[int, typer.Option(help="the median round is shown")] = 3,
    steps_per_second: Annotated[float, typer.Option(help="0: as fast as the gateway reads")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """What a token costs the gateway between an output processor's frame and the client's socket."""
    taken = [measure(num_streams, seconds, steps_per_second) for _ in range(rounds)]
    median = sorted(taken, key=lambda each: each.gateway_cpu_seconds_per_1000_tokens)[rounds // 2]
    if as_json:
        print(json.dumps(asdict(median)))
        return
    table = Table("figure", "value", title="engine frames to SSE bytes: the gateway's share")
    for name, value in asdict(median).items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stages", rate]:
            run_stage(serve_stages(float(rate)))
        case ["client", address, streams, duration]:
            run_stage(read_streams(address, int(streams), float(duration)))
        case _:
            typer.run(main)
