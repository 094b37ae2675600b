"""Every capability beside every other, on random weights and a GPU: those of an engine alone.

`headwater bench gpu --part combinations` runs a row of the table in each of its workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.combinations.cells import CELLS, Cell
from tests.combinations.conftest import CellRunner
from tests.combinations.systems import (
    ENGINE_VOCAB_SIZE,
    RANDOM_ON_GPU,
    SIZES_ON_GPU,
    Systems,
    write_config,
)

pytestmark = pytest.mark.gpu
CELLS_OF_AN_ENGINE = {name: cell for name, cell in CELLS.items() if cell.is_in_process_on_gpu}


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    folder = write_config(
        tmp_path_factory.mktemp("engine"), vocab_size=ENGINE_VOCAB_SIZE, **SIZES_ON_GPU
    )
    with contextlib.ExitStack() as stack:
        yield Systems(stack, folder, folder, RANDOM_ON_GPU)


@pytest.mark.parametrize("cell", CELLS_OF_AN_ENGINE.values(), ids=CELLS_OF_AN_ENGINE)
def test_tokens_are_as_promised_or_the_pair_is_refused_by_name(
    cell: Cell, systems: Systems, run_cell: CellRunner
) -> None:
    run_cell(cell, systems)
