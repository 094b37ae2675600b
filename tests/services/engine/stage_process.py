"""`headwater serve stage` as a process that is forked from one that has the libraries."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from headwater.services.runtime.process import PARENT_FD
from tests.forked_stage import ForkedStage
from tests.polling import holds_within
from tests.stage_log import StageLog

STAGE = "headwater.services.engine.programs.stage_host"


class ForkedStageHost(ForkedStage):
    def _main(self) -> None:
        importlib.import_module(self._stage).main()


class StageProcess:
    """A stage host, whose supervisor this process is."""

    def __init__(self, *flags: str) -> None:
        watched, self._supervisor = os.pipe()
        self._log = StageLog("the stage host")
        self._process = ForkedStageHost(
            STAGE, *flags, stderr=self._log.file, **{PARENT_FD: watched}
        )
        os.close(watched)

    @property
    def rank_pids(self) -> list[int]:
        pid = self._process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def lose_supervisor(self) -> None:
        if self._supervisor != -1:
            os.close(self._supervisor)
            self._supervisor = -1

    def wait(self, seconds: float = 60) -> int:
        return self._process.wait(seconds)

    def log(self) -> str:
        return self._log.text()

    def says(self, sentence: str, seconds: float = 60) -> bool:
        return holds_within(lambda: sentence in self.log(), seconds)

    def finish(self) -> None:
        self.lose_supervisor()
        self._process.wait(60)
        self._log.is_over = True


@contextlib.contextmanager
def stage_process(*flags: str) -> Iterator[StageProcess]:
    stage = StageProcess(*flags)
    try:
        yield stage
    finally:
        stage.finish()
