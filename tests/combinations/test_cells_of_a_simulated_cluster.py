"""Every capability beside every other: those that all stages make together and a CPU refuses, on simulated engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.combinations.cells import CELLS, Cell
from tests.combinations.conftest import CellRunner
from tests.combinations.systems import (
    RANDOM_ON_CPU,
    SIMULATED,
    TEXT_VOCAB_SIZE,
    Systems,
    with_few_tokens,
    with_plain_template,
    write_config,
)

SIMULATED_CELLS = {
    name: cell for name, cell in CELLS.items() if cell.is_simulated_on_cpu and not cell.is_in_process_on_cpu
}

# A cluster of its own, beside the other files of cells: none waits for another's.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def systems(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    folder = with_few_tokens(with_plain_template(demo_folder, tmp_path_factory.mktemp("models") / "random"))
    write_config(folder, vocab_size=TEXT_VOCAB_SIZE)
    with contextlib.ExitStack() as stack:
        yield Systems(stack, folder, folder, RANDOM_ON_CPU, families=(SIMULATED,))


@pytest.mark.parametrize("cell", SIMULATED_CELLS.values(), ids=SIMULATED_CELLS)
def test_tokens_are_as_promised_or_the_pair_is_refused_by_name(
    cell: Cell, systems: Systems, run_cell: CellRunner
) -> None:
    run_cell(cell, systems)
