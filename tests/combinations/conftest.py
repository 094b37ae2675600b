"""The cells as tests of three files, one for each platform, and what each records for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.combinations.cells import Cell
from tests.combinations.systems import Systems
from tests.forked_rank import forked_ranks

CellRunner = Callable[[Cell, Systems], None]


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    with forked_ranks():
        yield


@pytest.fixture
def run_cell(record_property: Callable[[str, object], None]) -> CellRunner:
    """Runs a cell and records its name, its place in the table, and what was seen."""

    def run(cell: Cell, systems: Systems) -> None:
        reported: dict[str, object] = {"name": cell.name, "place": cell.place}
        record_property("cell", reported)
        reported["seen"] = systems.check(cell)

    return run
