"""No field of the sampling contract is passed over: what draws on a device, and what draws on a CPU, reads each."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from headwater.engine_core.sampling_params import SamplingParams

CORE = Path(__file__).parents[2] / "engine_core"
FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
ABOVE_EXECUTORS = ["engine.py", *(f"scheduling/{path.name}" for path in sorted((CORE / "scheduling").glob("*.py")))]
"""They end answers, and plan what is scored and pooled."""
EXECUTORS = {
    "cpu": ["sampling/sampler.py", "sampling/edits.py", *ABOVE_EXECUTORS],
    "gpu": [
        "executors/device_table.py",
        "executors/device_sampler.py",
        "executors/row_settings.py",
        "sampling/edits.py",
        *ABOVE_EXECUTORS,
    ],
}
"""Files that read the fields for each executor. A new field is read by one of each list, or refused by name where the
request is taken: add it there, and to `is_plain` if it changes what is drawn."""


def read_in(file: str) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse((CORE / file).read_text())) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_field_of_sampling_is_read_where_tokens_are_drawn(executor: str) -> None:
    read = set[str]().union(*map(read_in, EXECUTORS[executor]))
    assert FIELDS - read == set()


def test_every_field_comes_from_the_engines_requests() -> None:
    source = (CORE.parent / "services" / "engine" / "requests.py").read_text()
    given = {node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.keyword)}
    assert FIELDS - given == set()
