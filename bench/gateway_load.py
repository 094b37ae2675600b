"""Measures the cost of a gateway alone: time added to short requests at a rate, memory and CPU of
open streams.

`overhead` puts a real gateway before stages that answer at once, and subtracts the times of the
same client with a server that does nothing. `streams` opens streams through a whole cluster whose
executor is simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from headwater.proto import common_pb2, engine_pb2, output_processor_pb2
from headwater.services.runtime.process import run_stage

from . import arrivals, datasets
from .datasets import Shape
from .figures import AsJson, show_figures
from .latency_report import Objective, summarize
from .own_cluster import own_cluster
from .processes import cpu_seconds, resident_bytes
from .program import run_app
from .serve_workers import drive
from .sse_client import SseConnection
from .sse_path import WARM_UP_SECONDS, first_line_of, served, stage, start
from .sse_stages import Stages, serve_stages

MODEL = "synthetic"
OPENED_AT_ONCE = 250
"""Streams whose first token the next ones wait for. A processor that gets thousands of prompts in
one moment is taken for lost."""
WORD = " word"
app = typer.Typer(no_args_is_help=True, add_completion=False, help="What a gateway costs.")


async def answer_at_once(incoming: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    """Handler of a Session that answers every request whole in one frame."""
    async for frame in incoming:
        adds = [opened.add for opened in frame.opens]
        if not adds:
            continue
        counts = [add.sampling.max_tokens for add in adds]
        ids = [add.stream_ids[0] for add in adds]
        yield output_processor_pb2.OutputFrame(
            stream_ids=ids,
            first_index=[0] * len(ids),
            num_tokens=counts,
            token_ids=[300] * sum(counts),
            texts=[WORD * count for count in counts],
            text_offset=[0] * len(ids),
            starts=[engine_pb2.Start(stream_id=stream_id) for stream_id in ids],
            finishes=[
                output_processor_pb2.OutputFinish(
                    stream_id=stream_id,
                    reason=common_pb2.FINISH_REASON_LENGTH,
                    num_output_tokens=count,
                )
                for stream_id, count in zip(ids, counts, strict=True)
            ],
        )


@app.command()
def overhead(
    rate: Annotated[float, typer.Option(help="requests a second, Poisson")] = 500.0,
    seconds: Annotated[float, typer.Option(help="of load")] = 10.0,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 4,
    pin: Annotated[
        bool, typer.Option(help="give the gateway a core that nothing else of this benchmark uses")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Measure the latency that a gateway adds to short requests, and its CPU time for one."""
    cores = sorted(os.sched_getaffinity(0))
    own, others = (
        ({cores[0]}, set(cores[1:])) if pin and len(cores) > 1 else (set(cores), set(cores))
    )
    os.sched_setaffinity(0, others)
    with contextlib.ExitStack() as running:
        stub = first_line_of(start(running, [sys.executable, "-m", "headwater.bench.stub_server"]))
        stages = start(running, [sys.executable, "-m", __spec__.name, "stages"])
        behind = first_line_of(stages)
        flags = ["--port=0", "--grpc-port=0", "--log-level=warning"]
        flags += [f"--processor={behind}", f"--output-processor={behind}", f"--replica={behind}"]
        gateway, addresses = stage(running, "headwater.gateway", flags)
        _move(gateway.pid, own)
        time.sleep(WARM_UP_SECONDS)
        _load(f"http://{addresses['rest']}", rate, 1.0, output_len)
        spent = cpu_seconds(gateway.pid)
        spent_behind = cpu_seconds(stages.pid)
        through = _load(f"http://{addresses['rest']}", rate, seconds, output_len)
        spent = cpu_seconds(gateway.pid) - spent
        spent_behind = cpu_seconds(stages.pid) - spent_behind
        floor = _load(stub, rate, seconds, output_len)
    figures = {
        "requests_per_s": through["requests_per_s"],
        "failed": through["failed"],
        "through_ms": {name: through["e2e_ms"][name] for name in ("p50", "p99")},
        "client_alone_ms": {name: floor["e2e_ms"][name] for name in ("p50", "p99")},
        "overhead_p50_ms": round(through["e2e_ms"]["p50"] - floor["e2e_ms"]["p50"], 3),
        "gateway_cpu_ms_per_request": round(spent / through["requests"] * 1000, 3),
        "stages_cpu_ms_per_request": round(spent_behind / through["requests"] * 1000, 3),
    }
    show_figures(figures, f"gateway overhead at {rate:g} requests a second", as_json=as_json)


@app.command()
def streams(
    num_streams: Annotated[int, typer.Option("--streams", help="that are open at once")] = 1024,
    tokens_per_second: Annotated[float, typer.Option(help="of each stream")] = 10.0,
    seconds: Annotated[float, typer.Option(help="that are measured")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Measure memory and CPU of one gateway with open streams."""
    os.environ |= {
        "HEADWATER_SIMULATED_STEP_SECONDS": str(1 / tokens_per_second),
        "HEADWATER_MAX_NUM_SEQS": str(num_streams),
        "HEADWATER_MAX_NUM_BATCHED_TOKENS": str(max(2048, num_streams)),
        "HEADWATER_NUM_BLOCKS": str(max(1024, num_streams * 64)),
        # A gateway reserves its last turns from the tenant with the most turns.
        "HEADWATER_MAX_RUNNING": str(max(4096, 2 * num_streams)),
    }
    with own_cluster(["--executor=simulated", "--replicas=1", "--log-level=warning"]) as (
        cluster,
        _,
    ):
        pid = next(each.pid for each in cluster.stages if each.name == "gateway-0")
        before = resident_bytes(pid)
        figures = asyncio.run(_hold(cluster.rest, cluster.model, pid, num_streams, seconds))
    figures["gateway_kib_per_stream"] = round(
        (figures["gateway_mib"] * 2**20 - before) / num_streams / 1024, 1
    )
    show_figures(figures, f"{num_streams} open streams", as_json=as_json)


async def _hold(
    base_url: str, model: str, pid: int, num_streams: int, seconds: float
) -> dict[str, Any]:
    """Opens the streams, some at once, waits until all have begun, and watches for some
    seconds."""
    body = {"model": model, "prompt": "Once", "max_tokens": 100_000 // 16, "ignore_eos": True}
    connections: list[SseConnection] = []
    calls: list[asyncio.Future[Any]] = []
    while len(calls) < num_streams:
        for _ in range(min(OPENED_AT_ONCE, num_streams - len(calls))):
            connections.append(await SseConnection.open(base_url))
            seeded = body | {"seed": len(calls)}
            calls.append(asyncio.ensure_future(connections[-1].call("/v1/completions", seeded, {})))
        while not all(connection.has_begun for connection in connections):
            await asyncio.sleep(0.1)
            if ended := [call for call in calls if call.done()]:
                error = ended[0].result().error
                raise RuntimeError(f"{len(ended)} of {len(calls)} streams ended: {error}")
    events = sum(each.num_pieces for each in connections)
    spent = cpu_seconds(pid)
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - began
    figures = {
        "streams": num_streams,
        "tokens_per_s": round((sum(each.num_pieces for each in connections) - events) / elapsed),
        "gateway_cpu_share_of_a_core": round((cpu_seconds(pid) - spent) / elapsed, 3),
        "gateway_mib": round(resident_bytes(pid) / 2**20, 1),
    }
    for call, connection in zip(calls, connections, strict=True):
        call.cancel()
        connection.close()
    await asyncio.gather(*calls, return_exceptions=True)
    return figures


def _load(base_url: str, rate: float, seconds: float, output_len: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    count = int(rate * seconds)
    shape = Shape(prompt_len=16, output_len=output_len, vocab_size=49152, model=MODEL)
    dialogues = list(datasets.random_prompts(count, shape, rng))
    outcomes, wall = drive(
        base_url, dialogues, list(arrivals.poisson(count, rate, rng)), 0, 1, quiet=True
    )
    return summarize(outcomes, wall, Objective())


def _move(pid: int, cores: set[int]) -> None:
    """Moves every thread of a process to some cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


if __name__ == "__main__":
    if sys.argv[1:] == ["stages"]:
        run_stage(serve_stages(Stages(served(MODEL), answer_at_once)))
    else:
        run_app(app)
