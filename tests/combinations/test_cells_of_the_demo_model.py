"""Every capability beside every other, on the demo model and a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from tests.combinations.capability import Refused
from tests.combinations.cells import CELLS, Cell
from tests.combinations.conftest import CellRunner
from tests.combinations.systems import Systems, with_plain_template

pytestmark = pytest.mark.long
HEAT = 5.0
"""A few letters of a pattern are drawn by lot then, and no seed gives another's answer."""
REFUSALS = {
    "tree numerics": Refused(field="numerics", says="allowed: default with activations in int8")
}
"""The model's weights are packed integers, which a CPU multiplies with such."""
NOT_COMPARED = {f"{name} × tree numerics" for name in ("fp8 weights", "FP8 block weights")}
COMPARED = {
    name: cell
    for name, cell in CELLS.items()
    if name not in NOT_COMPARED and not any(each.model for each in cell.both)
}
"""Weights in fp8 allow tree numerics, but the model without them refuses what the pair would be
compared with. No capability changes a model of trained weights."""


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    model = pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=silent, dtype="float32")
    folder = with_plain_template(model, tmp_path_factory.mktemp("models") / "demo")
    with contextlib.ExitStack() as stack:
        yield Systems(
            stack, folder, folder, {"device": "cpu"}, heat=HEAT, refusals=REFUSALS, is_rounded=True
        )


@pytest.mark.parametrize("cell", COMPARED.values(), ids=COMPARED)
def test_tokens_are_as_promised_or_the_pair_is_refused_by_name(
    cell: Cell, systems: Systems, run_cell: CellRunner
) -> None:
    run_cell(cell, systems)
