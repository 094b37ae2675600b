"""`headwater serve stage` beside an engine service: answers, deaths, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from headwater.services.engine.programs.stage_host import StageSettings
from headwater.services.runtime.settings import SettingError, read_settings
from tests.chatting_model import make_chatting_model
from tests.forked_host import free_address, write_secret
from tests.gateway.processes import launched
from tests.long_values import long_but
from tests.services.engine.engine_process import (
    EngineProcess,
    add,
    client_of,
    engine_process,
    wait_for_end,
)
from tests.services.engine.stage_process import StageProcess, stage_process
from tests.services.engine.test_ranks import (
    SMALL,
    long_answers,
    read_all,
)

PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_model(tmp_path_factory.mktemp("served"))


@dataclasses.dataclass(frozen=True)
class Place:
    folder: Path
    address: str
    secret: Path

    @property
    def engine_flags(self) -> tuple[str, ...]:
        own = "--pipeline-parallel-size=2", "--threads=1", "--stage-hosts=1"
        where = f"--stage-listen={self.address}", f"--stage-secret-file={self.secret}"
        return f"--model-folder={self.folder}", *SMALL, *own, *where

    @property
    def stage_flags(self) -> tuple[str, ...]:
        where = f"--join={self.address}", f"--stage-secret-file={self.secret}"
        return *where, f"--model-folder={self.folder}", "--threads=1"


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Place:
    return Place(folder, free_address(), write_secret(tmp_path))


@contextlib.contextmanager
def both(place: Place) -> Iterator[tuple[EngineProcess, StageProcess]]:
    with stage_process(*place.stage_flags) as stage, engine_process(*place.engine_flags) as engine:
        yield engine, stage


@pytest.mark.long
async def test_an_engine_and_a_stage_that_are_started_by_their_commands_answer_as_one_process(
    place: Place,
) -> None:
    reported = []
    with engine_process(f"--model-folder={place.folder}", *SMALL) as alone:
        async with client_of(alone) as client:
            await client.send(add(1, PROMPT, 40), add(2, PROMPT[::-1], 40))
            await client.read_until_finished(1, 2)
            reported.append((client.tokens[1], client.tokens[2]))
    command = [sys.executable, "-m", "headwater.services.cli", "serve", "stage", *place.stage_flags]
    stage = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    try:
        with engine_process(*place.engine_flags, start=launched) as engine:
            async with client_of(engine) as client:
                await client.send(add(1, PROMPT, 40), add(2, PROMPT[::-1], 40))
                await client.read_until_finished(1, 2)
                reported.append((client.tokens[1], client.tokens[2]))
            engine.terminate()
            assert engine.wait() == 0
            message = engine.close()
        stage.send_signal(signal.SIGTERM)
        received = (await stage.communicate())[1].decode()
        assert stage.returncode == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            stage.kill()
    assert reported[0] == reported[1]
    assert "stage 1 is computed on 127.0.0.1" in message
    assert f"stage 1 of the engine at {place.address} is computed here" in received
    assert "Traceback" not in received


async def test_an_engine_answers_with_a_stage_of_another_host_as_it_does_alone(
    place: Place,
) -> None:
    reported = []
    with engine_process(f"--model-folder={place.folder}", *SMALL) as alone, both(place) as (two, _):
        for engine in (alone, two):
            async with client_of(engine) as client:
                await client.send(add(1, PROMPT, 40), add(2, PROMPT[::-1], 40))
                await client.read_until_finished(1, 2)
                reported.append((client.tokens[1], client.tokens[2]))
    assert reported[0] == reported[1]


@pytest.mark.parametrize("moment", long_but(("prefill", "decode"), "decode"))
async def test_a_stage_host_that_is_killed_ends_the_engine_with_one_sentence(
    place: Place, moment: str
) -> None:
    with both(place) as (engine, stage):
        pids = stage.rank_pids
        async with client_of(engine) as client:
            if moment == "prefill":
                await client.send(
                    *(add(i, [i * 7 + j % 90 for j in range(400)], 60) for i in range(1, 9))
                )
            else:
                await client.send(*long_answers())
                await client.read_tokens(1, 3)
            stage.kill()
            await asyncio.to_thread(wait_for_end, engine.core_pid, 120)
            with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
                await read_all(client)
        for pid in pids:
            wait_for_end(pid, 60)
        assert engine.wait() != 0
        message = engine.close()
    assert re.search(
        r"rank 1 \(stage 1 on 127.0.0.1\) has closed its connection.*; all ranks of the engine end",
        message,
    )


@pytest.mark.long
async def test_a_stage_host_stays_for_the_next_engine_when_its_rank_or_the_engine_is_killed(
    place: Place,
) -> None:
    with stage_process(*place.stage_flags) as stage:
        for strike in ("rank", "engine", "none"):
            with engine_process(*place.engine_flags) as engine:
                [pid] = stage.rank_pids
                async with client_of(engine) as client:
                    await client.send(add(1, PROMPT, 20))
                    await client.read_until_finished(1)
                if strike == "rank":
                    os.kill(pid, signal.SIGKILL)
                    assert engine.wait() != 0
                    assert "rank 1 (stage 1 on 127.0.0.1) was ended by SIGKILL" in engine.close()
                elif strike == "engine":
                    os.kill(engine.pid, signal.SIGKILL)
                    engine.wait()
                else:
                    engine.terminate()
                    assert engine.wait() == 0
            wait_for_end(pid, 60)
        stage.lose_supervisor()
        assert stage.wait() == 0


@pytest.mark.long
def test_an_engine_that_waits_for_its_stages_ends_when_it_is_asked_to(place: Place) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-m", "headwater.services.engine", *place.engine_flags],
        stderr=subprocess.PIPE,
    )
    assert engine.stderr is not None
    for line in engine.stderr:
        if b"stage 1 is missing" in line:
            break
    engine.send_signal(signal.SIGTERM)
    assert engine.wait(60) == 0
    engine.stderr.close()


def test_a_new_knob_of_a_stage_is_a_decision() -> None:
    assert [field.name for field in dataclasses.fields(StageSettings)] == [
        "join", "stage_secret_file", "model_folder", "threads", "log_level",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--join is missing; allowed: host:port of an engine with --stage-listen"),
        (
            ["--join=a:1"],
            "--stage-secret-file is missing; allowed: the file with the engine's secret",
        ),
        (
            ["--join=a:1", "--stage-secret-file=/s"],
            "--model-folder is missing; allowed: the folder of a converted model",
        ),
        (
            ["--join=a:1", "--stage-secret-file=/s", "--model-folder=/m", "--threads=-1"],
            "--threads is -1; allowed: 0 or more",
        ),
    ],
)
def test_settings_of_a_stage_that_cannot_be_served_are_refused_by_name(
    flags: list[str], sentence: str
) -> None:
    with pytest.raises(SettingError) as refused:
        read_settings(StageSettings, flags, env={})
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            "--join=nowhere",
            "headwater stage: join is 'nowhere'; allowed: host:port, such as 10.0.0.1:7300",
        ),
        ("--model-folder=/no/folder", "headwater stage: /no/folder is not a converted model"),
        (
            "--stage-secret-file=/no/file",
            "allowed: a file that can be read (No such file or directory)",
        ),
    ],
)
def test_what_a_stage_cannot_do_is_refused_in_one_line(
    place: Place, changed: str, sentence: str
) -> None:
    with stage_process(*place.stage_flags, changed) as stage:
        assert stage.wait() == 1
        # The first line is the version.
        [_, message] = stage.log().strip().splitlines()
    assert sentence in message


@pytest.mark.long
def test_a_stage_without_the_engines_model_ends_and_the_engine_waits_for_another(
    place: Place, tmp_path: Path
) -> None:
    other = make_chatting_model(tmp_path, seed=1)
    with contextlib.ExitStack() as stack:
        wrong = stack.enter_context(stage_process(*place.stage_flags, f"--model-folder={other}"))

        def start_the_right_one() -> None:
            assert wrong.wait() == 1
            stack.enter_context(stage_process(*place.stage_flags))

        thread = threading.Thread(target=start_the_right_one)
        thread.start()
        with engine_process(*place.engine_flags) as engine:
            assert engine.address
            engine.terminate()
            assert engine.wait() == 0
            message = engine.close()
        thread.join()
        sentence = (
            f"model_folder is {str(other)!r}, whose weights file is not that of the engine's model"
        )
        assert f"headwater stage: {sentence}" in wrong.log()
        assert f"a connection for a pipeline stage from 127.0.0.1 refuses: {sentence}" in message
