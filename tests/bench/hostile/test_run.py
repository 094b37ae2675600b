"""The whole measurement, on a deployment of its own."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from headwater.bench.hostile.bodies import ALL_NAMES
from headwater.bench.hostile.table import Report

COMMAND = [sys.executable, "-m", "headwater.bench", "hostile", "--executor=simulated", "--json"]


def report_of_run(*flags: str) -> Report:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr.decode()
    [report] = msgspec.json.decode(done.stdout, type=dict[str, Report]).values()
    return report


@pytest.mark.long
def test_a_name_that_is_not_in_the_list_is_refused_before_anything_starts() -> None:
    done = subprocess.run(
        [*COMMAND, "--bodies=keys,none"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "--bodies is 'none'" in done.stderr


@pytest.mark.long
def test_a_small_key_is_refused_from_its_third_request_on() -> None:
    report = report_of_run("--bodies=backtracking-regexes", "--seconds=3")
    [row] = report.rows
    assert row.answers.get("200", 0) <= report.requests_per_minute == 2
    assert row.answers["429"] > 2
    assert not row.faults


@pytest.mark.long
@pytest.mark.parametrize("key", ["small", "generous"])
def test_a_neighbour_is_served_beside_every_hostile_body_as_docs_promise(key: str) -> None:
    report = report_of_run(f"--key={key}", "--seconds=4")
    assert tuple(row.body for row in report.rows) == ALL_NAMES
    assert [row for row in report.rows if not row.is_within_goals] == []
