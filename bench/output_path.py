"""Measures the output processor: engine frames in, frames of text out, in tokens per second of its own CPU time.

`python -m headwater.bench.output_path`; engine and gateway are this process, the output processor is a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table

from headwater.proto import output_processor_pb2_grpc
from headwater.proto.common_pb2 import Sampling
from headwater.proto.engine_pb2 import Add, ClientFrame, EngineFrame, InfoRequest, LogprobColumns
from headwater.proto.events_pb2 import Incarnation, Member
from headwater.proto.output_processor_pb2 import GatewayFrame, Open, OutputFrame
from headwater.services.models.manifest import ModelManifest
from headwater.services.runtime.channel import server_options
from headwater.services.runtime.process import READY_FD

from .program import run_program
from .text_folder import demo_text_folder

EPOCH = 1
WINDOW = 3
"""Largest number of the engine's frames that the gateway has not seen yet: as many steps are in flight anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    streams: int
    kind: str
    tokens: int
    frames_out: int
    cpu_seconds: float
    tokens_per_cpu_second: int
    tokens_per_second: int
    cpu_ms_per_1000_tokens: float


class Steps:
    """An engine that emits one token a stream and step, as fast as the gateway follows."""

    def __init__(self, num_streams: int, num_steps: int, vocab_size: int, with_logprobs: bool) -> None:
        self.complete = asyncio.Event()
        """Set when every stream is open."""
        self.go = asyncio.Event()
        self.seen = asyncio.Semaphore(WINDOW)
        self._numbers: list[int] = []
        self._num_streams, self._num_steps, self._with_logprobs = num_streams, num_steps, with_logprobs
        rng = random.Random(0)
        self._rows = [[rng.randrange(100, vocab_size) for _ in range(1024)] for _ in range(64)]

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Session": grpc.stream_stream_rpc_method_handler(
                self.session, ClientFrame.FromString, EngineFrame.SerializeToString
            ),
            "Info": grpc.unary_unary_rpc_method_handler(self.info, InfoRequest.FromString, Member.SerializeToString),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("headwater.v1.Engine", handlers),))

    async def info(self, request: Any, context: Any) -> Member:
        return Member(kind=Member.KIND_ENGINE, incarnation=Incarnation(replica_id="bench", epoch=EPOCH))

    async def session(self, request_iterator: AsyncIterator[ClientFrame], context: Any) -> AsyncIterator[EngineFrame]:
        reader = asyncio.create_task(self._read(request_iterator))
        await self.go.wait()
        count = self._num_streams
        for step in range(self._num_steps):
            await self.seen.acquire()
            ids = self._rows[step % len(self._rows)][:count]
            frame = EngineFrame(
                step=step, stream_ids=self._numbers, first_index=[step] * count, num_tokens=[1] * count, token_ids=ids
            )
            if self._with_logprobs:
                frame.logprobs.CopyFrom(
                    LogprobColumns(token_indices=range(count), logprobs=[-1.0] * count, num_top=[0] * count)
                )
            yield frame
        await reader

    async def _read(self, frames: AsyncIterator[ClientFrame]) -> None:
        async for frame in frames:
            for add in frame.adds:
                self._numbers += add.stream_ids
            if len(self._numbers) == self._num_streams:
                self.complete.set()


@contextlib.asynccontextmanager
async def output_processor(folder: Path) -> AsyncIterator[tuple[int, str]]:
    """Scope of a real process; yields its pid and address."""
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headwater.services.output_processor", f"--model-folder={folder}"),
        env={**os.environ, READY_FD: str(write)},
        pass_fds=(write,),
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(write)
    with os.fdopen(read) as word:
        line = await asyncio.to_thread(word.readline)
    try:
        yield process.pid, json.loads(line)["addresses"]["grpc"]
    finally:
        process.terminate()
        await process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(folder: Path, kind: str, sampling: Sampling, num_streams: int, num_steps: int) -> Measurement:
    manifest = ModelManifest.read(folder)
    engine, server = (
        Steps(num_streams, num_steps, manifest.vocab_size, sampling.logprobs),
        grpc.aio.server(options=server_options()),
    )
    engine.add_to(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with output_processor(folder) as (pid, at), grpc.aio.insecure_channel(at) as channel:
        call = output_processor_pb2_grpc.OutputProcessorStub(channel).Session()
        for stream_id in range(1, num_streams + 1):
            add = Add(stream_ids=[stream_id], num_prompt_tokens=2, prompt_ids=[1, 2], sampling=sampling, credit=1 << 30)
            opening = Open(engine_address=address, replica_id="bench", epoch=EPOCH, model=manifest.name, add=add)
            await call.write(GatewayFrame(opens=[opening]))
        await engine.complete.wait()
        cpu, started = cpu_seconds(pid), time.perf_counter()
        engine.go.set()
        tokens, frames = 0, 0
        while tokens < num_streams * num_steps:
            frame = await call.read()
            assert isinstance(frame, OutputFrame)
            frames += 1
            for _ in range((tokens + len(frame.token_ids)) // num_streams - tokens // num_streams):
                engine.seen.release()
            tokens += len(frame.token_ids)
        wall, cpu = time.perf_counter() - started, cpu_seconds(pid) - cpu
        call.cancel()
    await server.stop(grace=0)
    return Measurement(
        streams=num_streams,
        kind=kind,
        tokens=tokens,
        frames_out=frames,
        cpu_seconds=round(cpu, 2),
        tokens_per_cpu_second=round(tokens / cpu),
        tokens_per_second=round(tokens / wall),
        cpu_ms_per_1000_tokens=round(1e6 * cpu / tokens, 2),
    )


KINDS = {
    "plain": Sampling(),
    "one stop string": Sampling(stop=["\n\nUser:"]),
    "logprobs": Sampling(logprobs=True),
}


def table_of(measurements: list[Measurement]) -> Table:
    columns = list(asdict(measurements[0]))
    table = Table(*(column.replace("_", " ") for column in columns), title="output processor")
    for measurement in measurements:
        table.add_row(*(str(value) for value in asdict(measurement).values()))
    return table


def main(
    streams: Annotated[list[int] | None, typer.Option(help="streams at once (repeatable)")] = None,
    tokens: Annotated[int, typer.Option(help="tokens a measurement")] = 400_000,
    model_folder: Annotated[Path | None, typer.Option(help="a model folder (default: the demo model's text)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Tokens per CPU-second of one output processor."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder or demo_text_folder(Path(scratch))
        measurements = [
            asyncio.run(measure(folder, kind, sampling, count, tokens // count // (1 if kind == "plain" else 4)))
            for count in streams or [16, 256]
            for kind, sampling in KINDS.items()
        ]
    if as_json:
        print(json.dumps([asdict(measurement) for measurement in measurements], indent=2))
    else:
        Console().print(table_of(measurements))


if __name__ == "__main__":
    run_program(main)
