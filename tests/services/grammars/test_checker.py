"""Whether a grammar can be followed, found out in processes that may die at any time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.bench.hostile.constraints import many_alternatives
from headwater.services.grammars import checker as checker_module
from headwater.services.grammars.asker import Asker
from headwater.services.grammars.check import MAX_IDLE, TOO_LARGE, TOO_LONG, Fork
from headwater.services.grammars.check_process import CheckDied, Checked, CheckProcess, Question
from headwater.services.grammars.checker import (
    FREE_TEXT,
    MAX_CHECKS,
    VERDICT_BYTES,
    GrammarChecker,
    num_checks,
)
from headwater.services.grammars.grammars import GrammarError
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.fair_queue import QueueLimits
from headwater.services.runtime.yielding_thread import LOWERED
from tests.services.engine.engine_process import wait_for_end

ASKER = Asker("a", bytes(16))
GOOD = json.dumps({"grammars": [{"json_schema": {"type": "integer"}}]})
EXPLODING = json.dumps(
    {
        "grammars": [
            {
                "json_schema": {
                    "patternProperties": {f"^[a-z]{{{i},{i + 1}}}x{i}.*y$": {} for i in range(300)}
                }
            }
        ]
    }
)
"""Computes until its limit ends it."""


def children(pid: int | str = "self") -> set[int]:
    while True:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        # A thread that ends meanwhile leaves its children to another one, which may have been asked
        # before.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return {
                int(child) for task in tasks for child in (task / "children").read_text().split()
            }


def forks_of(pids: set[int]) -> set[int]:
    """Processes that try grammars, or are ready for one."""
    found = set[int]()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= children(pid)
    return found


def priorities(pid: int) -> set[int]:
    """Nice values of the threads of a process."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return found


async def slow_forks_of(pids: set[int], num: int = 1) -> set[int]:
    """So many forks that have computed for long, once there are."""
    async with asyncio.timeout(60):
        while True:
            slow = {pid for pid in forks_of(pids) if LOWERED in priorities(pid)}
            if len(slow) >= num:
                return slow
            await asyncio.sleep(0.001)


@pytest.fixture
def others() -> set[int]:
    """Children that are none of the checker's."""
    return children()


async def verdict(checker: GrammarChecker, folder: Path, grammar: str, asker: Asker = ASKER) -> str:
    try:
        await checker.check(folder, grammar, asker)
    except GrammarError as fault:
        return str(fault)
    return "good"


@contextlib.contextmanager
def killing(others: set[int], number: signal.Signals, *, times: int) -> Iterator[set[int]]:
    """Signals so many of the checker's processes a moment after they have started."""
    killed: set[int] = set()

    async def kill() -> None:
        while len(killed) < times:
            for pid in children() - others - killed:
                os.kill(pid, number)
                killed.add(pid)
            await asyncio.sleep(0.01)

    killer = asyncio.ensure_future(kill())
    try:
        yield killed
    finally:
        killer.cancel()


async def test_a_warm_checker_has_its_process_before_the_first_grammar(
    demo_folder: Path, others: set[int], capfd: pytest.CaptureFixture[str]
) -> None:
    async with GrammarChecker() as checker:
        await checker.warm(demo_folder)
        process = children() - others
        assert len(process) == 1
        assert await verdict(checker, demo_folder, GOOD) == "good"
        assert children() - others == process
        assert await verdict(checker, demo_folder, FREE_TEXT) == "good"
        await checker.warm(demo_folder / "nothing")
        assert "the grammar checker is not warm" in capfd.readouterr().out


@pytest.mark.long
async def test_a_process_that_died_idle_is_replaced(demo_folder: Path, others: set[int]) -> None:
    async with GrammarChecker() as checker:
        assert await verdict(checker, demo_folder, GOOD) == "good"
        (pid,) = children() - others
        os.kill(pid, signal.SIGKILL)
        assert await verdict(checker, demo_folder, GOOD + " ") == "good"
        assert children() - others - {pid}


async def test_a_process_that_is_killed_says_nothing_about_the_grammar(
    demo_folder: Path, others: set[int]
) -> None:
    async with GrammarChecker() as checker:
        with killing(others, signal.SIGKILL, times=1) as killed:
            assert await verdict(checker, demo_folder, GOOD) == "good"
            assert len(killed) == 1
        (idle,) = children() - others
        with killing(others | {idle}, signal.SIGKILL, times=2):
            os.kill(idle, signal.SIGKILL)
            with pytest.raises(Unavailable, match="cannot be found out now"):
                await checker.check(demo_folder, GOOD + " ", ASKER)
        assert await verdict(checker, demo_folder, GOOD + " ") == "good"


async def test_a_process_stays_ready_when_a_fork_is_killed_and_the_next_computes_for_too_long(
    demo_folder: Path, others: set[int]
) -> None:
    """A new process reads the tokenizer again, which took others' checks seconds on a busy
    machine."""
    async with GrammarChecker() as checker:
        assert await verdict(checker, demo_folder, GOOD) == "good"
        ready = children() - others
        trying = asyncio.ensure_future(verdict(checker, demo_folder, EXPLODING))
        forks = await slow_forks_of(ready)
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
        assert await trying == TOO_LONG
        assert await verdict(checker, demo_folder, GOOD + " ") == "good"
        assert children() - others == ready


async def test_a_fork_answers_until_it_has_computed_for_long(
    demo_folder: Path, others: set[int]
) -> None:
    """A fork for each grammar cost a tenant with small ones, and all beside it, ten times as
    much."""
    async with GrammarChecker() as checker:
        assert await verdict(checker, demo_folder, GOOD) == "good"
        ready = children() - others
        (fork,) = forks_of(ready)
        for i in range(1, 4):
            assert await verdict(checker, demo_folder, GOOD + " " * i) == "good"
        assert forks_of(ready) == {fork}
        slow = json.dumps({"grammars": [{"json_schema": many_alternatives(0)}]})
        assert await verdict(checker, demo_folder, slow) != "good"
        wait_for_end(fork, seconds=60)
        assert await verdict(checker, demo_folder, GOOD + " " * 4) == "good"
        assert children() - others == ready


@pytest.mark.long
async def test_idle_forks_of_many_models_are_bounded(
    demo_folder: Path, others: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with GrammarChecker() as checker:
        for i in range(MAX_IDLE + 2):
            (folder := tmp_path / f"model-{i}").symlink_to(demo_folder)
            assert await verdict(checker, folder, GOOD, Asker("a", bytes([i]) * 16)) == "good"
        async with asyncio.timeout(60):
            while len(forks_of(children() - others)) > MAX_IDLE:  # noqa: ASYNC110 (processes)
                await asyncio.sleep(0.01)


async def test_two_that_end_themselves_for_want_of_memory_say_that_it_takes_too_much(
    demo_folder: Path, others: set[int]
) -> None:
    async with GrammarChecker() as checker:
        with killing(others, signal.SIGABRT, times=2):
            assert await verdict(checker, demo_folder, GOOD) == TOO_LARGE


def test_a_fork_that_was_killed_gets_no_other_question_though_its_answer_is_there() -> None:
    """The next question was answered with the fork's death."""
    reader, writer = os.pipe()
    with subprocess.Popen(["sleep", "60"]) as sleeping, os.fdopen(reader, "rb") as answers:
        fork = Fork("", sleeping.pid, writer, answers, number=1)
        os.write(writer, b'{"error": null, "seconds": 0.1, "is_last": false}\n')
        fork.kill()
        assert fork.reply() == {"number": 1, "error": None, "seconds": 0.1}
        assert not fork.is_idle
    os.close(writer)


def test_grammars_that_die_of_memory_are_charged_to_their_tenant() -> None:
    class Dying:
        def check(self, question: Question) -> Checked:
            raise CheckDied(-signal.SIGABRT, 1.5)

    question = Question(number=1, folder="", grammar=GOOD, is_slow=False)
    assert checker_module._judged(Dying(), question) == Checked(TOO_LARGE, 3.0)


@pytest.mark.long
async def test_concurrent_checks_of_a_grammar_run_once(demo_folder: Path, others: set[int]) -> None:
    async with GrammarChecker() as checker:
        asking = [asyncio.ensure_future(verdict(checker, demo_folder, EXPLODING)) for _ in range(4)]
        async with asyncio.timeout(60):
            while not children() - others:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert len(children() - others) == 1
        asking[0].cancel()
        assert await asyncio.gather(*asking[1:]) == [TOO_LONG] * 3
        # Without its process the checker can answer only from memory.
        checker._process.close()
        assert await verdict(checker, demo_folder, EXPLODING) == TOO_LONG
    assert children() <= others


@pytest.mark.parametrize(("cores", "checks"), [(1, 3), (3, 3), (64, MAX_CHECKS)])
def test_a_small_machine_checks_fewer_grammars_at_once(
    cores: int, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "usable_cores", lambda: cores)
    assert num_checks() == checks


@pytest.mark.parametrize("cores", [3, 4])
async def test_a_tenants_grammars_are_checked_beside_a_flood_of_another_one(
    cores: int, demo_folder: Path, others: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "usable_cores", lambda: cores)
    # On a busy machine all of the flood would have waited too long by then, and be gone.
    monkeypatch.setattr(checker_module, "LIMITS", QueueLimits(wait_seconds=600.0))
    neighbour = Asker("neighbour", bytes(16))
    async with GrammarChecker() as checker:
        assert await verdict(checker, demo_folder, GOOD, neighbour) == "good"
        ready = children() - others
        flood = [
            asyncio.ensure_future(verdict(checker, demo_folder, EXPLODING + " " * i))
            for i in range(12)
        ]
        # One place stays free.
        await slow_forks_of(ready, cores - 1)
        for i in range(5):
            assert await verdict(checker, demo_folder, GOOD + " " * i, neighbour) == "good"
        # No check of the neighbour waited for the start of a process.
        assert children() - others == ready
        # In the order of arrival all of them were checked before.
        assert not all(each.done() for each in flood)
        for each in flood:
            each.cancel()


async def test_a_tenant_that_has_had_much_is_checked_with_a_lowered_priority_from_the_beginning(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many grammars, none of which is slow, took a core before others' first tokens."""
    asked: list[Question] = []
    check = CheckProcess.check

    def noting(process: CheckProcess, question: Question) -> Checked:
        asked.append(question)
        return check(process, question)

    monkeypatch.setattr(CheckProcess, "check", noting)
    neighbour = Asker("neighbour", b"n" * 16)
    async with GrammarChecker() as checker:
        for i in range(4):
            slow = json.dumps({"grammars": [{"json_schema": many_alternatives(i)}]})
            assert await verdict(checker, demo_folder, slow) != "good"
        assert await verdict(checker, demo_folder, GOOD) == "good"
        assert await verdict(checker, demo_folder, GOOD, neighbour) == "good"
    assert [question["is_slow"] for question in asked[-2:]] == [True, False]


async def test_a_slow_check_holds_up_no_other_one_and_ends_when_all_its_requests_have_left(
    demo_folder: Path, others: set[int]
) -> None:
    """Reaping a fork used up a core while a second thread of it, of a lowered priority, ended."""
    async with GrammarChecker() as checker:
        assert await verdict(checker, demo_folder, GOOD) == "good"
        ready = children() - others
        asking = [asyncio.ensure_future(verdict(checker, demo_folder, EXPLODING)) for _ in range(2)]
        (fork,) = await slow_forks_of(ready)
        assert os.listdir(f"/proc/{fork}/task") == [str(fork)]
        os.kill(fork, signal.SIGSTOP)
        # More than a pipe holds.
        assert await verdict(checker, demo_folder, GOOD + " " * 200_000) == "good"
        asking[0].cancel()
        await asyncio.wait([asking[0]])
        assert fork in forks_of(ready)
        asking[1].cancel()
        await asyncio.wait([asking[1]])
        # Else it would keep its place, and a share of a core, from checks of others.
        wait_for_end(fork, seconds=60)
        assert await verdict(checker, demo_folder, GOOD + " ") == "good"
        assert children() - others == ready


async def test_a_verdict_is_remembered_in_its_namespace_alone(demo_folder: Path) -> None:
    async with GrammarChecker() as checker:
        for asker in (ASKER, Asker("b", bytes(range(16))), Asker("a", bytes(range(16)))):
            assert await verdict(checker, demo_folder, GOOD, asker) == "good"
        # Without its process the checker can answer only from memory.
        checker._process.close()
        assert await verdict(checker, demo_folder, GOOD, ASKER) == "good"
        with pytest.raises(Unavailable):
            await checker.check(demo_folder, GOOD, Asker("c", b"c" * 16))


async def test_verdicts_of_a_flood_drive_out_none_of_another_tenant(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_REMEMBERED_BYTES", 10 * VERDICT_BYTES)
    neighbour = Asker("neighbour", b"n" * 16)
    async with GrammarChecker() as checker:
        assert await verdict(checker, demo_folder, GOOD, neighbour) == "good"
        for i in range(20):
            assert await verdict(checker, demo_folder, GOOD + " " * i) == "good"
        assert len(checker._remembered) == 10
        checker._process.close()
        assert await verdict(checker, demo_folder, GOOD, neighbour) == "good"


STAGE = """
import asyncio, pathlib, sys
from headwater.services.grammars.asker import Asker
from headwater.services.grammars.checker import GrammarChecker

async def main():
    await GrammarChecker().check(
        pathlib.Path(sys.argv[1]), sys.argv[2], Asker("a", bytes(16))
    )
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_its_processes_end_with_the_stage_even_when_that_is_killed(demo_folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STAGE, str(demo_folder), GOOD], stdout=subprocess.PIPE
    ) as stage:
        assert stage.stdout is not None
        assert stage.stdout.readline() == b"ready\n"
        (pid,) = children(stage.pid)
        stage.kill()
    wait_for_end(pid, seconds=60)
