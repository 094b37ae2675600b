"""Which worker runs what: a file with its fixtures is one worker's, and so are rooms that start
many processes.

NOTE: not by `xdist_group`: its plugin writes a group into a name that this pytest does not read,
and says nothing.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOMS = (
    "tests/line/",
    "tests/gateway/tenancy/",
    "tests/gateway/request/",
    "tests/gateway/jobs/",
    "tests/gateway/",
)
"""Folders whose tests share what takes longest to start; the first match counts. They wait for
processes more than they compute."""
SHARING = ("tests/line/", "tests/gateway/")
"""Folders whose tests share processes for as long as a worker runs any of them."""
ALONE = tuple(f"tests/line/test_line_{each}.py" for each in ("elastic", "handover", "ranks"))
"""Files of those folders that share nothing with the others, and take minutes."""

GPU_SECONDS = Path(__file__).with_name("gpu_seconds.json")
"""Seconds of the longest case of each test that a GPU's suite took 15 s and more for, with kernels
to compile. `python -m tests.gpu_seconds` writes it."""
ItemT = TypeVar("ItemT")

BY_ROW = "tests/combinations/test_cells_of_an_engine_on_gpu.py"
"""Its tests share engines, most of them those of one row of the table."""


def group_of(nodeid: str) -> str:
    if nodeid.startswith(BY_ROW):
        # pytest writes the sign between two names so.
        return nodeid.split(r" \xd7 ", 1)[0]
    file = nodeid.split("::", 1)[0]
    return (
        file if file in ALONE else next((room for room in ROOMS if nodeid.startswith(room)), file)
    )


def by_group(config: pytest.Config, log: Any) -> Any:
    """The plugin's scheduler, which keeps the order that it is given."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 (not every machine that runs tests has it)

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _reschedule(self, node: Any) -> None:
            if node not in self.registered_collections:
                # It has just replaced another worker, and is given tests when it has collected
                # them.
                return
            super()._reschedule(node)
            # A worker begins a test when it knows the next one. One that replaces another is given
            # a group, of which a single test may be left.
            while (
                self.workqueue
                and not node.shutting_down
                and self._pending_of(self.assigned_work[node]) < 2
            ):
                self._assign_work_unit(node)

        def remove_node(self, node: Any) -> str | None:
            # The plugin's own would run the test that ended a worker again, on one worker after
            # another.
            groups = self.assigned_work[node]
            crashed = next(
                (
                    name
                    for group in groups.values()
                    for name, is_done in group.items()
                    if not is_done
                ),
                None,
            )
            for group, tests in list(groups.items()):
                if crashed in tests:
                    tests[crashed] = True
                # Nor does a worker that is given a group without a test to run ask for another.
                if all(tests.values()):
                    del groups[group]
            super().remove_node(node)
            return crashed

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def compile_once(config: pytest.Config) -> None:
    """In a new environment, one process collects the tests before the workers do. Those start
    together, and each would compile what all of them import, a minute of a core."""
    is_worker = hasattr(config, "workerinput")
    spec = importlib.util.find_spec("torch")
    if (
        is_worker
        or not config.getoption("numprocesses", None)
        or spec is None
        or spec.origin is None
    ):
        return
    if not Path(importlib.util.cache_from_source(spec.origin)).exists():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-qq",
            "-p",
            "no:cacheprovider",
        ]
        subprocess.run(command, cwd=config.rootpath, stdout=subprocess.DEVNULL, check=False)


class SharedFixtures:
    """Ends the fixtures that tests of a folder share when a worker leaves the folder. Stages and
    clusters that waited for the end of the run took an eighth of a core all the while
    (2026-11-30)."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, Any, Any]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> None:
        for folder in SHARING:
            if fixturedef.scope == "session" and f"{fixturedef.baseid}/".startswith(folder):
                self._begun.append((folder, fixturedef, request))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> None:
        if nextitem is None:
            return
        left = [each for each in self._begun if not nextitem.nodeid.startswith(each[0])]
        self._begun = [each for each in self._begun if each not in left]
        for _, fixture, request in reversed(left):
            fixture.finish(request)


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts, so that no worker waits for another at the end: the rooms, files with a slow test,
    then the others."""
    slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, bool]:
        group = group_of(item.nodeid)
        return group not in ROOMS, group not in slow

    items.sort(key=place)


def deal_longest(
    items: Sequence[ItemT], names: Sequence[str], seconds: Mapping[str, float], num_workers: int
) -> list[ItemT]:
    """Items in an order of which equal parts, one a worker, begin with the longest tests, dealt out
    one by one. Tests that nothing is known about keep their order."""
    tests = [name.split("[", 1)[0] for name in names]
    known = sorted(
        (i for i in range(len(items)) if tests[i] in seconds), key=lambda i: -seconds[tests[i]]
    )
    others = iter([i for i in range(len(items)) if tests[i] not in seconds])
    dealt: list[ItemT] = []
    for worker in range(num_workers):
        size = (len(items) - len(dealt)) // (num_workers - worker)
        # Later parts are never smaller, so no part gets more long tests than it has room for.
        longest = known[num_workers - 1 - worker :: num_workers]
        rest = [next(others) for _ in range(size - len(longest))]
        dealt += [items[i] for i in (*longest, *rest)]
    return dealt


STOLEN = "tests_are_stolen"
"""Key in a worker's input: whether workers steal tests from each other, as those of the GPU's suite
do. A worker's own options do not show it."""


def send_how_tests_are_shared(node: Any) -> None:
    """Adds `STOLEN` to the input of a worker that is about to start."""
    node.workerinput[STOLEN] = node.config.option.dist == "worksteal"


def deal_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tests of a worker. Compilers take most of the time of a GPU's tests: one that
    began late would be waited for."""
    given = getattr(config, "workerinput", {})
    names = [item.nodeid for item in items]
    if given.get(STOLEN) and not any(map(_shares_a_row, names)):
        seconds = json.loads(GPU_SECONDS.read_text())
        items[:] = deal_longest(items, names, seconds, given["workercount"])


def _shares_a_row(nodeid: str) -> bool:
    return nodeid.startswith(BY_ROW)
