"""The order in which workers get the tests of a GPU's suite."""

from __future__ import annotations

import json

import pytest

from tests.gpu_seconds import longest_cases
from tests.workers import GPU_SECONDS, deal_longest


def test_each_worker_begins_with_a_long_test() -> None:
    names = [f"a::{name}" for name in ("b", "c[1]", "c[2]", "d", "e", "f[x]", "g", "h")]
    seconds = {"a::f": 90, "a::c": 50}
    dealt = deal_longest(names, names, seconds, 3)
    assert sorted(dealt) == names
    # Parts of two, three and three tests.
    assert dealt == ["a::c[2]", "a::b", "a::c[1]", "a::d", "a::e", "a::f[x]", "a::g", "a::h"]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("num_long", [0, 1, 4, 7])
def test_every_test_is_dealt_once(num_workers: int, num_long: int) -> None:
    names = [f"{'t' if i < num_long else 'u'}[{i}]" for i in range(7)]
    assert sorted(deal_longest(names, names, {"t": 20}, num_workers)) == names


def test_the_longest_case_of_a_test_counts_with_its_fixtures() -> None:
    lines = [
        {"started": "k::t[1]"},
        {"id": "k::t[1]", "phase": "setup", "seconds": 9.0},
        {"id": "k::t[1]", "phase": "call", "seconds": 21.4},
        {"id": "k::t[2]", "phase": "call", "seconds": 16.0},
        {"id": "k::short", "phase": "call", "seconds": 3.0},
        {"id": "tests/engine_core/parallel/a::t", "phase": "call", "seconds": 99.0},
    ]
    assert longest_cases(map(json.dumps, lines)) == {"k::t": 30}


def test_the_file_names_tests_with_whole_seconds() -> None:
    seconds = json.loads(GPU_SECONDS.read_text())
    assert all(name.count("::") == 1 and least >= 15 for name, least in seconds.items())
