"""Stages on other hosts that are killed while a cluster answers: every answer ends as if nothing
had happened, token for token, when the engine is back with its stages."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chatting_model import make_chatting_model
from tests.forked_cluster import ForkedCluster
from tests.forked_host import free_address, write_secret
from tests.line.conftest import Line
from tests.line.test_line_ranks import ENV, NAME, SAMPLED, body_of, pauses_of_a_death
from tests.services.engine.stage_process import StageProcess

pytestmark = pytest.mark.slow


@dataclass
class StagedLine:
    """A line with one engine, and the host of that one's second stage, which a supervisor starts
    again."""

    line: Line
    stage_flags: tuple[str, ...]
    stage: StageProcess

    def finish_stage(self) -> None:
        self.stage.finish()

    def start_stage_again(self) -> None:
        self.finish_stage()
        self.stage = StageProcess(*self.stage_flags)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedLine]:
    folder = make_chatting_model(tmp_path_factory.mktemp("small"))
    state = tmp_path_factory.mktemp("staged")
    address = free_address()
    secret = write_secret(tmp_path_factory.mktemp("secret"))
    shared = f"--stage-secret-file={secret}", f"--model-folder={folder}", "--threads=1"
    flags = (f"--join={address}", *shared)
    where = {
        "HEADWATER_STAGE_HOSTS": "1",
        "HEADWATER_STAGE_LISTEN": address,
        "HEADWATER_STAGE_SECRET_FILE": str(secret),
    }
    asked = (
        "--pipeline-parallel-size=2",
        "--replicas=1",
        f"--served-model-name={NAME}",
        "--max-model-len=1024",
    )
    with contextlib.ExitStack() as stack:
        stage = StageProcess(*flags)
        stack.callback(stage.finish)
        line = stack.enter_context(
            Line(state, f"--model={folder}", *asked, env=ENV | where, start=ForkedCluster)
        )
        found = StagedLine(line, flags, stage)
        stack.callback(found.finish_stage)
        yield found
        assert line.stop() == 0, line.log.read_text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("killed", "moment"),
    [("host", "decode"), ("host", "prefill"), ("rank", "decode")],
)
@pytest.mark.long
def test_answers_go_on_token_for_token_when_a_stage_host_is_killed(
    staged: StagedLine, killed: str, moment: str
) -> None:
    line = staged.line
    bodies = [
        body_of(f"{moment} {killed} {i}", sampled, 150, 240) for i, sampled in enumerate(SAMPLED)
    ]

    def kill() -> None:
        if killed == "host":
            staged.stage.kill()
            staged.start_stage_again()
        else:
            os.kill(staged.stage.rank_pids[0], signal.SIGKILL)

    pauses = sorted(pauses_of_a_death(line, 1, bodies, moment, kill))
    print(f"{len(pauses)} answers moved, pauses from {pauses[0]:.2f} to {pauses[-1]:.2f} s")
    assert "rank 1 (stage 1 on 127.0.0.1)" in engine_log(line.state_dir)


def engine_log(state_dir: Path) -> str:
    [path] = (state_dir / "logs").glob("engine-0*")
    return path.read_text()
