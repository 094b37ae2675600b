"""An engine's core on a GPU that is killed: the process that stands by goes on with its answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from headwater.bench.workloads import MODELS
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.services.engine.core.client import CoreClient
from headwater.services.engine.core.environment import core_environment
from headwater.services.engine.core.messages import Add, OfSteps, Step
from headwater.services.engine.core.variables import CORE_FORKS_FD, WEIGHTS_HOLDER_FD
from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime.forked import fork_server
from headwater.services.stack.fork_servers import CORE_MODULES, VARIABLES_OF_CORES
from tests.engine_core.test_held_memory import Holder
from tests.polling import holds_within
from tests.services.engine.test_forked_core import parent_of

pytestmark = pytest.mark.gpu
STANDBY = b"headwater.kernels.launch.standby"
PROMPT = [5 + (7 * i) % 400 for i in range(300)]
NUM_TOKENS = 60


class Answer:
    """Tokens that a core reports."""

    def __init__(self, core: CoreClient) -> None:
        self.token_ids: list[int] = []
        self._core = core
        self._has_more = asyncio.Event()
        core.connect(self._on_report, self._has_more.set)

    async def go_on(self, key: int, begun: list[int], num_tokens: int) -> list[int]:
        """The first tokens behind those of an answer that has begun."""
        self.token_ids.clear()
        sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS)
        self._core.send(
            Add(NewRequest(key=key, prompt_ids=PROMPT, output_ids=begun, sampling=sampling))
        )
        return await self.until(num_tokens)

    async def until(self, num_tokens: int) -> list[int]:
        """The first tokens of the answer under way."""
        while len(self.token_ids) < num_tokens:
            assert not self._core.gone.is_set()
            self._has_more.clear()
            await self._has_more.wait()
        return self.token_ids[:num_tokens]

    def _on_report(self, report: OfSteps) -> None:
        if isinstance(report, Step):
            self.token_ids += report.output.token_ids
            self._has_more.set()


def standby_pids() -> list[int]:
    """Processes of this test that stand by."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and STANDBY in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return [pid for pid in found if parent_of(parent_of(pid)) == os.getpid()]


async def test_the_process_that_stands_by_goes_on_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-0.6b"]))
    settings = EngineSettings(
        model_folder=tmp_path, device="cuda", load_format="dummy", block_size=64, max_num_seqs=16
    )
    environment = core_environment(settings.threads)
    with (
        closing(Holder()) as holder,
        fork_server(
            CORE_MODULES["cuda"], environment=environment, free_variables=VARIABLES_OF_CORES
        ) as forks,
    ):
        assert forks is not None
        monkeypatch.setenv(WEIGHTS_HOLDER_FD, str(holder.requests.fileno()))
        monkeypatch.setenv(CORE_FORKS_FD, str(forks.socket.fileno()))
        async with asyncio.timeout(240), CoreClient.running(settings) as core:
            await core.ready()
            answer = Answer(core)
            expected = await answer.go_on(1, [], NUM_TOKENS)
            while not core.is_prepared:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
            assert await asyncio.to_thread(holds_within, standby_pids, 60)
            [standby] = standby_pids()
            begun = await answer.go_on(2, [], 20)
            assert begun == expected[:20]
            os.kill(core.pid, signal.SIGKILL)
            killed_at = time.perf_counter()
            await core.gone.wait()
        async with asyncio.timeout(240), CoreClient.running(settings) as core:
            await core.ready()
            answer = Answer(core)
            await answer.go_on(3, begun, 1)
            print(f"{time.perf_counter() - killed_at:.2f} s from the kill to the next token")
            assert core.pid == standby
            assert await answer.until(NUM_TOKENS - 20) == expected[20:]
