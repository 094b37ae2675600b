"""Every capability beside every other, on random weights and a CPU; on the simulated executor what a CPU refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from tests.combinations.cells import CELLS, Cell
from tests.combinations.conftest import CellRunner
from tests.combinations.systems import (
    ENGINE_VOCAB_SIZE,
    TEXT_VOCAB_SIZE,
    Systems,
    with_few_tokens,
    with_plain_template,
    write_config,
)

# Told first of a run's groups: it starts many processes.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def systems(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    base = tmp_path_factory.mktemp("models")
    text_folder = with_few_tokens(with_plain_template(demo_folder, base / "random"))
    write_config(text_folder, vocab_size=TEXT_VOCAB_SIZE)
    (base / "engine").mkdir()
    engine_folder = write_config(base / "engine", vocab_size=ENGINE_VOCAB_SIZE)
    with contextlib.ExitStack() as stack:
        options = {"device": "cpu", "dtype": "float32", "load_format": "dummy"}
        systems = Systems(stack, engine_folder, text_folder, options)
        systems.start_cluster()
        yield systems


# Those in this process first, while the stages of the others start.
@pytest.mark.parametrize("cell", sorted(CELLS.values(), key=attrgetter("is_above_engine")), ids=attrgetter("name"))
def test_tokens_are_as_promised_or_the_pair_is_refused_by_name(
    cell: Cell, systems: Systems, run_cell: CellRunner
) -> None:
    run_cell(cell, systems)
