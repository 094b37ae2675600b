"""Plugin of pytest: runs the tests that take longest first, so that no process waits for another at
the end.

`-p headwater.bench.pytest_order --seconds-file=FILE`: JSON, the seconds of each test by its id.
Tests that the file does not have come last, in the order that they have.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    # NOTE: no `type`. xdist sends options to its workers, and no paths.
    parser.addoption("--seconds-file", help="seconds of tests by id, which run longest first")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path: str | None = config.getoption("--seconds-file")
    if path is not None:
        seconds = json.loads(Path(path).read_text())
        items.sort(key=lambda item: -seconds.get(item.nodeid, 0.0))
