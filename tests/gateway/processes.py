"""Stages as the processes that they are, for the tests beside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from headwater.services.runtime.process import PARENT_FD, READY_FD
from tests.forked_stage import ForkedStage
from tests.polling import holds_within
from tests.stage_log import StageLog

MODEL = "smollm2-135m-instruct"
THINKER = "thinking"
"""A model that thinks and calls tools."""
THINKER_BYTES = 1000
"""Size of the file of its weights, which nothing reads."""
QUIET = ("--metrics-port=-1", "--log-level=warning")
UNDRAFTED: dict[str, Any] = {"speculative": {"mode": "off"}}
"""Turns drafts off. An answer that was given before is otherwise drafted, many tokens a step, and
ends too early for tests that need it to run."""
ENGINE_FLAGS = (
    "--executor=simulated",
    f"--served-model-name={MODEL}",
    "--max-model-len=8192",
    "--num-blocks=8192",
)


ReadT = TypeVar("ReadT")


class Stage:
    """One process; it ends with its supervisor's pipe, so with the test whatever happens."""

    def __init__(self, module: str, *flags: str, start: Callable[..., Any] = ForkedStage) -> None:
        ready_read, ready_write = os.pipe()
        watched, self._supervisor = os.pipe()
        self._log = StageLog(module)
        self.process = start(
            module, *flags, stderr=self._log.file, **{READY_FD: ready_write, PARENT_FD: watched}
        )
        os.close(ready_write)
        os.close(watched)
        self._ready = os.fdopen(ready_read)
        self.addresses: dict[str, str] = {}

    def wait_ready(self) -> Stage:
        with self._ready:
            line = self._ready.readline()
        assert line, self.close()
        self.addresses = json.loads(line)["addresses"]
        return self

    @property
    def address(self) -> str:
        return self.addresses["grpc"]

    def says(self, sentence: str) -> bool:
        """Whether the log of the stage contains the sentence."""
        return sentence in self._log.text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def release(self) -> None:
        """Lets it end, as a supervisor's death does."""
        if self._supervisor != -1:
            os.close(self._supervisor)
            self._supervisor = -1

    def close(self) -> str:
        """Ends it, if it has not ended; returns its log."""
        self.release()
        self.process.wait(60)
        self._log.is_over = True
        return self._log.text()


def launched(module: str, *flags: str, stderr: int, **descriptors: int) -> subprocess.Popen[bytes]:
    """A stage as a person starts it, its imports included."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *flags],
        env=os.environ | {name: str(number) for name, number in descriptors.items()},
        pass_fds=tuple(descriptors.values()),
        stderr=stderr,
    )


@contextlib.contextmanager
def started(*stages: Stage) -> Iterator[None]:
    """Starts them side by side, ends them with the scope."""
    try:
        for stage in stages:
            stage.wait_ready()
        yield
    finally:
        for stage in stages:
            stage.release()
        for stage in stages:
            stage.close()


def processor_stage(folder: Path, *flags: str) -> Stage:
    return Stage("headwater.services.processor", f"--model-folder={folder}", *QUIET, *flags)


def output_processor_stage(folder: Path, *flags: str) -> Stage:
    return Stage("headwater.services.output_processor", f"--model-folder={folder}", *QUIET, *flags)


def engine_stage(*flags: str) -> Stage:
    return Stage("headwater.services.engine", *ENGINE_FLAGS, *QUIET, *flags)


def gateway_stage(*flags: str, start: Callable[..., Any] = ForkedStage) -> Stage:
    return Stage(
        "headwater.gateway", "--port=0", "--grpc-port=0", "--log-level=warning", *flags, start=start
    )


@dataclass(frozen=True, slots=True)
class Behind:
    """The stages behind a gateway."""

    processor: str
    output_processor: str
    replicas: tuple[str, ...]

    def flags(self) -> list[str]:
        seeds = [f"--processor={self.processor}", f"--output-processor={self.output_processor}"]
        return seeds + [f"--replica={address}" for address in self.replicas]


class Gateway:
    """A gateway and a client of its REST surface. The context manager closes the client."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.rest = f"http://{stage.addresses['rest']}"
        self.grpc = stage.addresses["grpc"]
        self.client = httpx.Client(base_url=self.rest, timeout=60, verify=False)

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        assert holds_within(condition, seconds), "it did not come about in time"

    def first(self, read: Callable[[], ReadT], condition: Callable[[ReadT], object]) -> ReadT:
        """Reads until the condition holds, and returns the last value."""
        last: list[ReadT] = []

        def look() -> bool:
            last[:] = [read()]
            return bool(condition(last[0]))

        assert holds_within(look, 60.0), f"it did not come about in time; the last was {last}"
        return last[0]

    def wait_for_replicas(self, count: int) -> None:
        """Returns when the gateway knows so many engines."""
        self.first(
            lambda: self.client.get("/admin/replicas").json()["data"],
            lambda known: len(known) == count,
        )

    def is_ready(self) -> bool:
        return self.client.get("/ready").status_code == 200

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Sums of several metrics over their labels, from one read."""
        sums = dict.fromkeys(names, 0.0)
        for line in self.client.get("/metrics").text.splitlines():
            if (name := line.split("{")[0].split(" ")[0]) in sums:
                sums[name] += float(line.rsplit(" ", 1)[1])
        return list(sums.values())

    def refused(self, code: str) -> float:
        """The number of requests that were refused with a code, or left by their client."""
        name = f'headwater_requests_refused_total{{code="{code}"}}'
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def chat(self, text: str = "Tell me of a river.", **more: Any) -> dict[str, Any]:
        reply = self.client.post("/v1/chat/completions", json=chat_body(text, **more))
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def complete(self, prompt: Any = "Once upon a time", **more: Any) -> dict[str, Any]:
        reply = self.client.post("/v1/completions", json=completion_body(prompt, **more))
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A whole stream; the end mark is checked and left out."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


def chat_body(text: str = "Tell me of a river.", **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
    } | more


def completion_body(prompt: Any = "Once upon a time", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0} | more
