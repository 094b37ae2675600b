"""Tests that ruin their process, run by real pytest: what becomes of the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headwater.bench.isolated_tests import IsolatedTests, Results, Verdicts, judge

ROOT = Path(__file__).parents[2]
CONFTEST = """
import builtins
import pytest
from headwater.bench.pytest_health import ProcessHealth

def pytest_configure(config):
    config.pluginmanager.register(ProcessHealth(config, lambda: getattr(builtins, "ruin", "")))
"""
BY_GROUP = """
from tests import workers

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return workers.by_group(config, log)
"""
HEAD = """
import builtins
import os
import pytest

pytestmark = pytest.mark.gpu
"""
FIRST = """
def test_leaves_something_behind():
    builtins.left = True
"""
DIES_BEHIND_IT = """
def test_dies():
    if hasattr(builtins, "left"):
        os.abort()
"""
COMES_LAST = """
def test_comes_last():
    assert not hasattr(builtins, "ruin"), "an illegal memory access"
"""
MODULE = f"""{HEAD}
def test_passes():
    pass

def test_fails():
    assert 1 == 2

def test_is_skipped():
    pytest.skip("not here")
{FIRST}
def test_wants_nothing_left_behind():
    assert not hasattr(builtins, "left"), "something was left behind"

@pytest.mark.parametrize("place", [1, 2])
def test_ruins(place):
    builtins.ruin = "an illegal memory access"
    assert place == 1, "seen at once"

def test_computes():
    assert not hasattr(builtins, "ruin"), "an illegal memory access"

def test_aborts():
    os.abort()
{COMES_LAST}"""
UNUSED_PLUGINS = (
    "cacheprovider",
    "asyncio",
    "hypothesispytest",
    "langsmith_plugin",
    "schemathesis",
    "anyio",
    "valkey",
)
INI = f"[pytest]\nmarkers = gpu\naddopts = {' '.join(f'-p no:{name}' for name in UNUSED_PLUGINS)}\n"
NAMES = (
    *(
        "test_passes",
        "test_fails",
        "test_is_skipped",
        "test_leaves_something_behind",
        "test_wants_nothing_left_behind",
    ),
    *("test_ruins[1]", "test_ruins[2]", "test_computes", "test_aborts", "test_comes_last"),
)
RUINED = (
    "Failed: test_module.py::test_ruins[1] has left its process unusable: an illegal memory access"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_module.py").write_text(MODULE)
    return tmp_path


def run(folder: Path, *selected: str, limit: float = 250.0) -> Verdicts:
    return IsolatedTests(["-m", "gpu", *selected], limit, num_processes=2, cwd=folder).run()


def named(results: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("test_module.py::"): output for name, output in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers",
    [("-n", "1", "--dist", "worksteal"), ("-p", "no:xdist")],
    ids=["xdist", "alone"],
)
@pytest.mark.long
def test_each_test_has_a_verdict_of_its_own(folder: Path, workers: tuple[str, ...]) -> None:
    verdicts = run(folder, *workers)
    assert not verdicts.green
    assert (verdicts.passed, verdicts.failed, verdicts.skipped, verdicts.not_run) == (4, 5, 1, [])
    failures = named(verdicts.failures)
    assert failures.keys() == {"test_fails", "test_ruins[1]", "test_ruins[2]", "test_aborts"}
    assert failures["test_fails"] == "assert 1 == 2 (at test_module.py:12)"
    assert failures["test_ruins[1]"] == RUINED
    assert failures["test_ruins[2]"] == "AssertionError: seen at once (at test_module.py:26)"
    assert failures["test_aborts"].startswith("its process failed with -6")
    assert named(verdicts.failed_together) == {
        "test_wants_nothing_left_behind": "AssertionError: something was left behind (at "
        "test_module.py:21)"
    }
    if workers[0] == "-n":
        # xdist replaced each worker that ended: every test was reached.
        assert (verdicts.run_again, verdicts.notes) == (5, {})
    else:
        assert verdicts.run_again == 7
        victims = dict.fromkeys(
            ("test_computes", "test_comes_last"), "test_module.py::test_ruins[1]"
        )
        assert named(verdicts.notes) == {
            name: f"passed alone; failed behind {by}" for name, by in victims.items()
        }
    assert json.loads(json.dumps(verdicts.plain()))["failed"] == 5


@pytest.mark.slow
@pytest.mark.long
def test_a_process_that_dies_without_a_word_takes_no_result_with_it(folder: Path) -> None:
    (folder / "test_module.py").write_text(f"{HEAD}{FIRST}{DIES_BEHIND_IT}{COMES_LAST}")
    verdicts = run(folder, "-p", "no:xdist")
    assert (verdicts.green, verdicts.passed, verdicts.failed, verdicts.run_again) == (
        False,
        2,
        1,
        2,
    )
    assert named(verdicts.failed_together) == {"test_dies": "its process ended"}
    assert named(verdicts.notes) == {"test_comes_last": "passed alone; was not reached"}
    assert verdicts.why.startswith("failed with -6")


def test_a_file_that_cannot_be_collected_is_a_failure_with_its_error(folder: Path) -> None:
    (folder / "test_module.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_passes(): pass\n"
    )
    assert run(folder).green
    (folder / "test_other.py").write_text("import no_such_module\n")
    verdicts = run(folder, "--continue-on-collection-errors")
    assert (verdicts.green, verdicts.passed) == (False, 1)
    assert verdicts.failures == {
        "test_other.py": "ModuleNotFoundError: No module named 'no_such_module'"
    }


@pytest.mark.long
def test_tests_without_time_left_are_not_green(folder: Path) -> None:
    (folder / "test_module.py").write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): "
        "time.sleep(600)\n"
    )
    verdicts = run(folder, "-p", "no:xdist", limit=8.0)
    assert (verdicts.green, verdicts.passed, verdicts.why) == (False, 1, "out of time")
    assert verdicts.not_run == ["test_module.py::test_b"]


def test_nothing_collected_is_not_green(folder: Path) -> None:
    (folder / "test_module.py").write_text("def test_of_no_gpu(): pass\n")
    verdicts = run(folder)
    assert (verdicts.green, verdicts.passed, verdicts.failed) == (False, 0, 0)
    assert verdicts.why.startswith("failed with 5")


def test_a_failure_that_was_not_run_again_stays_one() -> None:
    together = Results(
        collected=["a", "b"], outcomes={"a": "failed"}, errors={"a": "wrong"}, started={"a", "b"}
    )
    verdicts = judge(together, {"a": None, "b": None})
    assert verdicts.failures == {"a": "wrong (not run again: out of time)"}
    assert (verdicts.not_run, verdicts.run_again, verdicts.green) == (["b"], 0, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by_group", "num_workers"),
    [
        pytest.param(False, "1", id="load-1", marks=pytest.mark.long),
        pytest.param(False, "2", id="load-2", marks=pytest.mark.long),
        pytest.param(True, "1", id="by group-1", marks=pytest.mark.long),
        pytest.param(True, "2", id="by group-2", marks=pytest.mark.long),
    ],
)
def test_plain_pytest_loses_no_result_to_a_ruined_worker(
    folder: Path, by_group: bool, num_workers: str
) -> None:
    """Two files, each with two tests that ruin their process and one that aborts it."""
    (folder / "conftest.py").write_text(CONFTEST + (BY_GROUP if by_group else ""))
    (folder / "test_other.py").write_text(MODULE)
    path = folder / "results"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        num_workers,
        "-p",
        "headwater.bench.pytest_results",
    ]
    # xdist replaces four workers for each that it began with.
    command += ["--max-worker-restart=6"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [*command, f"--results-file={path}"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 1, done.stdout
    results = Results.read(path)
    assert results.outcomes.keys() == {
        f"{file}::{name}" for file in ("test_module.py", "test_other.py") for name in NAMES
    }
    for file in ("test_module.py", "test_other.py"):
        culprits = {name for name in NAMES if f"{file}::{name}" in results.culprits}
        assert culprits == {"test_ruins[1]", "test_ruins[2]", "test_aborts"}
        assert (
            results.outcomes[f"{file}::test_computes"]
            == results.outcomes[f"{file}::test_comes_last"]
            == "passed"
        )
    assert results.victims == {}
    # Each once: what ended a worker is not run again.
    crashed = Counter(
        line for line in done.stdout.splitlines() if line.startswith("replacing crashed worker")
    )
    assert len(crashed) == 6
    assert "has left its process unusable: an illegal memory access" in done.stdout
