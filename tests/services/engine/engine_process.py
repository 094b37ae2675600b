"""An engine service in processes of its own, and a client of its Session, for the tests beside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.sampling_params import SamplingParams
from headwater.proto import engine_pb2 as pb
from headwater.proto import engine_pb2_grpc
from headwater.proto.common_pb2 import Sampling, Speculative
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.process import PARENT_FD, READY_FD
from tests.forked_stage import ForkedStage
from tests.stage_log import StageLog

VOCAB_SIZE = 49152
MODEL = SimulatedModel(vocab_size=VOCAB_SIZE, first_token_id=256)
FLAGS = (
    "--executor=simulated",
    "--served-model-name=simulated",
    "--max-model-len=4096",
    "--num-blocks=2048",
)


class EngineProcess:
    """A server and its core. `address` is where the server answers."""

    def __init__(self, *flags: str, start: Callable[..., Any] = ForkedStage) -> None:
        ready_read, ready_write = os.pipe()
        watched, self._supervisor = os.pipe()
        self._log = StageLog("the engine")
        descriptors = {READY_FD: ready_write, PARENT_FD: watched}
        self.process = start(
            "headwater.services.engine", *FLAGS, *flags, stderr=self._log.file, **descriptors
        )
        os.close(ready_write)
        os.close(watched)
        with os.fdopen(ready_read) as word:
            line = word.readline()
        word = json.loads(line) if line else {"addresses": {}, "children": []}
        self.addresses: dict[str, str] = word["addresses"]
        self._children: list[int] = word["children"]

    @property
    def address(self) -> str:
        assert self.addresses, f"the engine ended before it was ready: {self.close()}"
        return self.addresses["grpc"]

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def core_pid(self) -> int:
        [core] = self._children
        return core

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def lose_supervisor(self) -> None:
        os.close(self._supervisor)
        self._supervisor = -1

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    def close(self) -> str:
        """Ends it, if it has not ended; returns its log."""
        if self._supervisor != -1:
            self.lose_supervisor()
        self.process.wait(60)
        self._log.is_over = True
        return self._log.text()


@contextlib.contextmanager
def engine_process(*flags: str, start: Callable[..., Any] = ForkedStage) -> Iterator[EngineProcess]:
    engine = EngineProcess(*flags, start=start)
    try:
        yield engine
    finally:
        engine.close()


def wait_for_end(pid: int, seconds: float) -> None:
    """Of a process that need not be a child; one that has ended and that nobody has asked about yet
    counts."""
    deadline = time.monotonic() + seconds
    # It may go between the opening of its file and the reading.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.01)


class Client:
    """One Session. Gathers what comes, by stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = engine_pb2_grpc.EngineStub(channel)
        self.call = self.stub.Session()
        self.frames: list[pb.EngineFrame] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.starts: dict[int, pb.Start] = {}
        self.finishes: dict[int, pb.Finish] = {}

    async def send(self, *adds: pb.Add, **fields: Any) -> None:
        await self.call.write(pb.ClientFrame(adds=adds, **fields))

    async def read(self) -> pb.EngineFrame:
        frame: Any = await self.call.read()
        assert frame is not grpc.aio.EOF, "the session ended"
        self.frames.append(frame)
        start = 0
        for stream_id, first_index, count in zip(
            frame.stream_ids, frame.first_index, frame.num_tokens, strict=True
        ):
            assert stream_id not in self.finishes
            assert first_index == len(self.tokens[stream_id])
            self.tokens[stream_id] += frame.token_ids[start : start + count]
            start += count
        self.starts |= {start.stream_id: start for start in frame.starts}
        self.finishes |= {finish.stream_id: finish for finish in frame.finishes}
        return frame

    async def read_until_finished(self, *stream_ids: int) -> None:
        async with asyncio.timeout(60):
            while not self.finishes.keys() >= set(stream_ids):
                await self.read()

    async def read_tokens(self, stream_id: int, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.tokens[stream_id]) < count:
                await self.read()

    async def load(self, timeout: float | None = None) -> Any:
        return (await self.stub.Info(pb.InfoRequest(), timeout=timeout)).load

    async def idle_load(self) -> Any:
        """The engine's load once nothing runs or waits."""
        return await self.load_that(
            lambda load: not (load.num_running or load.num_waiting or load.num_used_blocks)
        )

    async def load_that(self, condition: Callable[[Any], bool]) -> Any:
        """The engine's load once the condition holds of it."""
        async with asyncio.timeout(60):
            while True:
                load = await self.load()
                if condition(load):
                    return load
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def client_of(engine: EngineProcess) -> AsyncIterator[Client]:
    # With the proofs of the scope's token, if there is one.
    async with open_channel(engine.address) as channel:
        client = Client(channel)
        try:
            yield client
        finally:
            client.call.cancel()


def add(stream_id: int, prompt_ids: Sequence[int], max_tokens: int = 16, **fields: Any) -> pb.Add:
    """A greedy request of one choice, with room for the whole answer unless `credit` says less."""
    values: dict[str, Any] = {
        "stream_ids": [stream_id],
        "num_prompt_tokens": len(prompt_ids),
        "prompt_ids": prompt_ids,
        "sampling": Sampling(temperature=0.0, max_tokens=max_tokens),
        "cache_namespace": bytes(16),
        "credit": max_tokens,
    }
    return pb.Add(**(values | fields))


def undrafted(max_tokens: int) -> Sampling:
    """Sampling of a greedy answer without drafts, which comes token by token even if it repeats
    itself."""
    return Sampling(temperature=0.0, max_tokens=max_tokens, speculative=Speculative(mode="off"))


def answer(prompt_ids: Sequence[int], max_tokens: int = 16, **fields: Any) -> list[int]:
    """What a greedy request is answered."""
    return expected_tokens(
        MODEL, prompt_ids, SamplingParams(temperature=0.0, max_tokens=max_tokens), **fields
    )


def prompt(seed: int, length: int = 40) -> list[int]:
    """A prompt that shares no block with that of another seed."""
    return [(seed * 7919 + i * 31) % VOCAB_SIZE for i in range(length)]
