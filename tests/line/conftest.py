"""A running line for whole-system tests: `headwater up` as a newcomer starts it, on free ports, in
its own folder."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.engine_core.platforms.cpu_kernels import compile_kernels
from headwater.kernels.cpu import block_activations, block_rows, tile_kernel
from headwater.kernels.cpu.compiler.compiled import DTYPES
from headwater.kernels.quant.block_formats import Q4_1, Q8_0
from headwater.services.cli import status
from headwater.services.models.store import default_cache_dir
from headwater.services.runtime.hardware import resolve_dtype
from headwater.services.stack.cluster_record import ClusterRecord, read_cluster
from headwater.services.stack.token_file import key_of_cluster
from tests.forked_cluster import ForkedCluster
from tests.polling import holds_within

MODEL = "smollm2-135m-instruct"
PACE = {"HEADWATER_SIMULATED_STEP_SECONDS": "0.01", "HEADWATER_SIMULATED_PREFILL_SECONDS": "0.0001"}
"""Of engines without a model: slow enough that a test can interfere."""
KV_CACHE_BYTES = (256 << 20) * (2 if resolve_dtype("auto", "cpu") == "float32" else 1)
"""KV cache of a replica of the demo model: as many blocks whatever number format is the fast one
here."""
DEMO_ENV = {"HEADWATER_KV_CACHE_MEMORY": str(KV_CACHE_BYTES)}


def launched(
    *arguments: str, environment: Mapping[str, str], output: int
) -> subprocess.Popen[bytes]:
    """The command as a person starts it, and each of its processes as it starts them."""
    command = [sys.executable, "-m", "headwater.services.cli", *arguments]
    return subprocess.Popen(
        command, stdout=output, stderr=output, env=environment, start_new_session=True
    )


class Line:
    """One line and what a test does to it. The context manager kills the line if it still runs."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        log_name: str = "up.log",
        start: Callable[..., Any] = launched,
    ) -> None:
        self.state_dir = folder
        self.log = folder / log_name
        arguments = [
            "up",
            f"--state-dir={folder}",
            f"--cache-dir={default_cache_dir()}",
            "--port=0",
            "--grpc-port=0",
        ]
        environment = os.environ | PACE | {"COLUMNS": "200"} | (env or {})
        with self.log.open("wb") as output:
            self.process = start(
                *arguments, *flags, environment=environment, output=output.fileno()
            )
        self.client = httpx.Client(timeout=60, verify=False)
        # The first one on a machine downloads and converts the model, and compiles its kernels.
        self.wait_for(lambda: read_cluster(folder) is not None, 240, "the cluster is not ready")
        self.client.base_url = httpx.URL(self.record.rest)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def record(self) -> ClusterRecord:
        record = read_cluster(self.state_dir)
        assert record is not None, self.log.read_text()
        return record

    def pid_of(self, stage: str) -> int:
        return next(each.pid for each in self.record.stages if each.name == stage)

    def pids_of(self, stage: str) -> list[int]:
        """A stage's processes: an engine has two."""
        roots = next(
            [each.pid, *each.children] for each in self.record.stages if each.name == stage
        )
        return list(dict.fromkeys(pid for root in roots for pid in [root, *descendants(root)]))

    def pids(self) -> list[int]:
        """Every process of the line, grandchildren included."""
        roots = [self.process.pid, *(stage.pid for stage in self.record.stages)]
        return sorted({pid for root in roots for pid in [root, *descendants(root)]})

    def addresses(self) -> list[tuple[str, int]]:
        """Every port that a process of the line listens on, as far as it says so."""
        record = self.record
        named = [
            record.grpc,
            *(each for stage in record.stages for each in stage.addresses.values()),
        ]
        hosts = [each.rpartition("/")[2].rpartition(":") for each in [*named, record.rest]]
        return sorted({(host, int(port)) for host, _, port in hosts if host})

    def wait_ended(self, pids: list[int], seconds: float) -> list[int]:
        """Those of the processes that still run when the time is over."""
        end = time.monotonic() + seconds
        while alive(pids) and time.monotonic() < end:
            time.sleep(0.02)
        return alive(pids)

    def chat(
        self, messages: list[dict[str, str]], headers: dict[str, str] | None = None, **more: Any
    ) -> dict[str, Any]:
        """A whole answer; greedy unless told otherwise."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0} | more
        reply = self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def stream(
        self, prompt: str, **more: Any
    ) -> contextlib.AbstractContextManager[Iterator[dict[str, Any]]]:
        """Events of a streamed completion, errors among them; leaving the scope early is a client
        that leaves."""
        return self._stream("/v1/completions", {"prompt": prompt} | more)

    def stream_chat(
        self, messages: list[dict[str, str]], **more: Any
    ) -> contextlib.AbstractContextManager[Iterator[dict[str, Any]]]:
        return self._stream("/v1/chat/completions", {"messages": messages} | more)

    @contextlib.contextmanager
    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        body = {"model": MODEL, "max_tokens": 64, "temperature": 0, "stream": True} | body
        with self.client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            yield (
                json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")
            )

    def metric(self, name: str) -> float:
        """The sum of a metric of the gateway over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name
        ]
        assert values, f"no metric {name}"
        return sum(values)

    def loads(self) -> dict[str, dict[str, Any]]:
        """What each engine says of its load, by replica."""
        members = status.as_json(
            status.seen(self.record.nats_url, key_of_cluster(self.state_dir, os.environ), None)
        )
        return {each["replica_id"]: each for each in members if each["kind"] == "engine"}

    def loads_of(self, num_engines: int) -> dict[str, dict[str, Any]]:
        """Loads of all engines, once so many have answered. A single listing may miss a slow
        engine."""
        loads: dict[str, dict[str, Any]] = {}

        def are_heard() -> bool:
            loads.clear()
            loads.update(self.loads())
            return len(loads) == num_engines

        self.wait_for(are_heard, 60, f"not {num_engines} engines are heard")
        return loads

    def wait_for(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        if not holds_within(condition, seconds, as_long_as=lambda: self.process.poll() is None):
            self.kill()
            raise AssertionError(f"{otherwise}:\n{self.log.read_text()}")

    def stop(self, number: signal.Signals = signal.SIGINT, seconds: float = 60) -> int:
        """Ends the line as its terminal would; its exit status."""
        self.client.close()
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """As a crash would; also how a test's line ends that failed."""
        self.client.close()
        self.process.kill()
        self.process.wait()


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    children: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += [int(child) for child in tasks.read_text().split()]
    return [each for child in children for each in [child, *descendants(child)]]


def alive(pids: list[int]) -> list[int]:
    """Those that run; one that ended and waits to be reaped does not."""
    return [pid for pid in pids if _state(pid) not in ("gone", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


LineStarter = Callable[..., Line]


@pytest.fixture
def start_line(tmp_path: Path) -> Iterator[LineStarter]:
    """Starts lines that end with the test, however it ends."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **options: Any) -> Line:
            folder = tmp_path / f"line-{next(numbers)}"
            folder.mkdir()
            return stack.enter_context(Line(folder, *flags, **options))

        yield start


@pytest.fixture(scope="session")
def simulated_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """Two replicas without a model, shared by the tests that leave it as they found it: whoever
    died is back."""
    folder = tmp_path_factory.mktemp("simulated")
    with Line(folder, "--executor=simulated", "--replicas=2", start=ForkedCluster) as line:
        yield line
        assert line.stop() == 0, line.log.read_text()


@pytest.fixture(scope="session")
def demo_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """Two replicas of the demo model and two output processors, shared as above."""
    # Conversion leaves kernels compiled, but other sources may have converted the model. An engine
    # that has to compile them itself keeps 60 MiB of the compiler.
    products = map(tile_kernel.kernel_of, (Q4_1, Q8_0))
    look_up = block_rows.kernel_of(Q8_0)
    of_blocks = [block_activations.KERNEL, *products, look_up]
    for dtype in DTYPES:
        compile_kernels(dtype, lambda done, total: None, of_blocks)
    folder = tmp_path_factory.mktemp("demo")
    with Line(
        folder, "--replicas=2", "--output-processors=2", env=DEMO_ENV, start=ForkedCluster
    ) as line:
        yield line
        assert line.stop() == 0, line.log.read_text()
