"""The order in which workers get the tests of a GPU's suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_seconds import longest_cases
from tests.workers import GPU_SECONDS, deal_longest

ROOT = Path(__file__).parents[1]


def test_each_worker_begins_with_a_long_test() -> None:
    names = [f"a::{name}" for name in ("b", "c[1]", "c[2]", "d", "e", "f[x]", "g", "h")]
    seconds = {"a::f": 90, "a::c": 50}
    dealt = deal_longest(names, names, seconds, 3)
    assert sorted(dealt) == names
    # Parts of two, three and three tests.
    assert dealt == ["a::c[2]", "a::b", "a::c[1]", "a::d", "a::e", "a::f[x]", "a::g", "a::h"]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("num_long", [0, 1, 4, 7])
def test_every_test_is_dealt_once(num_workers: int, num_long: int) -> None:
    names = [f"{'t' if i < num_long else 'u'}[{i}]" for i in range(7)]
    assert sorted(deal_longest(names, names, {"t": 20}, num_workers)) == names


CONFTEST = """
import pytest
from pathlib import Path
from tests import workers

workers.GPU_SECONDS = Path(__file__).with_name("seconds.json")

def pytest_configure_node(node):
    workers.send_how_tests_are_shared(node)

def pytest_collection_modifyitems(config, items):
    workers.deal_gpu_tests(config, items)

def pytest_runtest_logreport(report):
    if report.when == "call" and hasattr(report, "worker_id"):
        print("ran", report.worker_id, report.nodeid)
"""


@pytest.mark.long
def test_workers_that_steal_begin_with_long_tests(tmp_path: Path) -> None:
    tests = "".join(f"def test_{name}(): pass\n" for name in "abcdefgh")
    (tmp_path / "test_them.py").write_text(tests)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    seconds = {f"test_them.py::test_{name}": 60 for name in "fg"}
    (tmp_path / "seconds.json").write_text(json.dumps(seconds))
    command = [sys.executable, "-m", "pytest", "-s", "-q", "-n", "2", "--dist", "worksteal"]
    flags = ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"{tmp_path}/test_them.py"]
    run = subprocess.run([*command, *flags], capture_output=True, text=True, check=True, cwd=ROOT)
    first = {}
    for line in run.stdout.splitlines():
        if "ran gw" in line:
            worker, name = line.partition("ran ")[2].split()
            first.setdefault(worker, name)
    assert sorted(name[-1] for name in first.values()) == ["f", "g"]


def test_the_longest_case_of_a_test_counts_with_its_fixtures() -> None:
    lines = [
        {"started": "k::t[1]"},
        {"id": "k::t[1]", "phase": "setup", "seconds": 9.0},
        {"id": "k::t[1]", "phase": "call", "seconds": 21.4},
        {"id": "k::t[2]", "phase": "call", "seconds": 16.0},
        {"id": "k::short", "phase": "call", "seconds": 3.0},
        {"id": "tests/engine_core/parallel/a::t", "phase": "call", "seconds": 99.0},
    ]
    assert longest_cases(map(json.dumps, lines)) == {"k::t": 30}


def test_the_file_names_tests_with_whole_seconds() -> None:
    seconds = json.loads(GPU_SECONDS.read_text())
    assert all(name.count("::") == 1 and least >= 15 for name, least in seconds.items())
