"""Every capability beside every other, on random weights and a CPU: those of an engine alone.

What a CPU refuses runs on the simulated executor. No cell here shares anything with those of a
cluster: two workers run the two files beside each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.combinations.cells import CELLS, Cell, on_a_cpu
from tests.combinations.conftest import CellRunner
from tests.combinations.systems import ENGINE_VOCAB_SIZE, RANDOM_ON_CPU, Systems, write_config

CELLS_OF_AN_ENGINE = {name: cell for name, cell in CELLS.items() if cell.is_in_process_on_cpu}

# Among the first groups of a run, beside the cells of a cluster.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    folder = write_config(tmp_path_factory.mktemp("engine"), vocab_size=ENGINE_VOCAB_SIZE)
    with contextlib.ExitStack() as stack:
        yield Systems(stack, folder, folder, RANDOM_ON_CPU)


@pytest.mark.parametrize("cell", on_a_cpu(CELLS_OF_AN_ENGINE))
def test_tokens_are_as_promised_or_the_pair_is_refused_by_name(
    cell: Cell, systems: Systems, run_cell: CellRunner
) -> None:
    run_cell(cell, systems)
