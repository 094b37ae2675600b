"""Every capability beside every other, on random weights and a GPU: those that pass all stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.combinations.cells import CELLS, Cell
from tests.combinations.conftest import CellRunner
from tests.combinations.systems import (
    RANDOM_ON_GPU,
    SIZES_ON_GPU,
    Systems,
    with_plain_template,
    write_config,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CELLS_OF_A_CLUSTER = {name: cell for name, cell in CELLS.items() if not cell.is_in_process_on_gpu}


@pytest.fixture(scope="module")
def systems(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    folder = tmp_path_factory.mktemp("models") / "random"
    folder = write_config(with_plain_template(demo_folder, folder), **SIZES_ON_GPU)
    with contextlib.ExitStack() as stack:
        yield Systems(stack, folder, folder, RANDOM_ON_GPU)


@pytest.mark.parametrize("cell", CELLS_OF_A_CLUSTER.values(), ids=CELLS_OF_A_CLUSTER)
def test_tokens_are_as_promised_or_the_pair_is_refused_by_name(
    cell: Cell, systems: Systems, run_cell: CellRunner
) -> None:
    run_cell(cell, systems)
