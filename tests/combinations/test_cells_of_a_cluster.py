"""Every capability beside every other, on random weights and a CPU: those that all stages make
together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.combinations.cells import CELLS, Cell, on_a_cpu
from tests.combinations.conftest import CellRunner
from tests.combinations.systems import (
    RANDOM_ON_CPU,
    TEXT_VOCAB_SIZE,
    Systems,
    with_few_tokens,
    with_plain_template,
    write_config,
)

CELLS_OF_A_CLUSTER = {name: cell for name, cell in CELLS.items() if not cell.is_in_process_on_cpu}

# Among the first groups of a run: it starts many processes.
pytestmark = pytest.mark.slow


def cells_among(items: Iterable[pytest.Item]) -> list[Cell]:
    """The cells of this file that are run."""
    return [
        item.callspec.params["cell"]
        for item in items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]


@pytest.fixture(scope="module")
def systems(
    request: pytest.FixtureRequest, demo_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Systems]:
    folder = with_few_tokens(
        with_plain_template(demo_folder, tmp_path_factory.mktemp("models") / "random")
    )
    write_config(folder, vocab_size=TEXT_VOCAB_SIZE)
    with contextlib.ExitStack() as stack:
        yield Systems(
            stack, folder, folder, RANDOM_ON_CPU, cells=cells_among(request.session.items)
        )


@pytest.mark.parametrize("cell", on_a_cpu(CELLS_OF_A_CLUSTER))
def test_tokens_are_as_promised_or_the_pair_is_refused_by_name(
    cell: Cell, systems: Systems, run_cell: CellRunner
) -> None:
    run_cell(cell, systems)
