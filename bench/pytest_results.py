"""Plugin of pytest: writes the result of each test at once as a line of JSON, so that a death of
the process loses no results.

`-p headwater.bench.pytest_results --results-file=FILE`. With xdist the process that shares out
tests writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .isolated_tests import CRASHED
from .pytest_health import POISONED

MOST_CHARACTERS = 300
"""Largest number of characters that are kept of an error's first line."""
MOST_PLACES = 4
"""Most frames of a traceback that are kept."""


def pytest_addoption(parser: pytest.Parser) -> None:
    # NOTE: no `type`. xdist sends options to its workers, and no paths.
    parser.addoption(
        "--results-file", help="write what becomes of each test here, as lines of JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    path: str | None = config.getoption("--results-file")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultsFile(Path(path)))


class ResultsFile:
    """Lines: {"collected": ids}, {"broken": id of a file, "error"}, {"started": id}, or a phase of
    a test: {"id", "phase", "outcome", "seconds", "error", "worker", "poisoned", "properties"};
    properties are what the test recorded."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._has_collected = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collected(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(broken=report.nodeid, error=first_line(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        node = getattr(report, "node", None)
        self._write(
            id=report.nodeid,
            # xdist has no phase for the report that it makes of a worker's end.
            phase=report.when if report.when in ("setup", "call", "teardown") else CRASHED,
            outcome=report.outcome,
            seconds=round(report.duration, 2),
            error=first_line(report) if report.failed else "",
            worker=node.gateway.id if node is not None else "",
            poisoned=any(name == POISONED for name, _ in report.user_properties),
            properties={name: value for name, value in report.user_properties if name != POISONED},
        )

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _collected(self, ids: Sequence[str]) -> None:
        # All workers collect the same tests, also one that replaces another.
        if not self._has_collected:
            self._has_collected = True
            self._write(collected=list(ids))

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")


def first_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """First line of the error's message, if there is one, and the innermost frames of its
    traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (crash.message if crash is not None else report.longreprtext).strip()
    if crash is None and "\nE " in text:
        text = text[text.index("\nE ") + 3 :].strip()
    line = str(text.partition("\n")[0][:MOST_CHARACTERS])
    places = _places(report)
    return f"{line} (at {' < '.join(places)})" if places else line


def _places(report: pytest.CollectReport | pytest.TestReport) -> list[str]:
    """`file:line` of calls, innermost first. Empty where the report has no traceback."""
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ())
    found = [each.reprfileloc for each in entries if getattr(each, "reprfileloc", None) is not None]
    return [f"{place.path}:{place.lineno}" for place in reversed(found[-MOST_PLACES:])]
