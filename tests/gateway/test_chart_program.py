"""The program of the chart's `helm test`, against a gateway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.processes import MODEL, Gateway

PROGRAM = Path(__file__).parents[2] / "deploy/helm/headwater/files/test.py"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((MODEL,), 0, f"ready, with {MODEL}"),
        (("--chat", MODEL), 0, f"{MODEL} answers: "),
        ((MODEL, "another"), 1, f"models are not listed: another; listed: {MODEL}"),
    ],
    ids=["listed", "answered", "missing"],
)
def test_it_ends_well_where_the_models_are_listed_and_answer(
    gateway: Gateway, tmp_path: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    keys = tmp_path / "api-keys"
    keys.write_text("local the-key-of-a-tenant\n")
    command = [sys.executable, str(PROGRAM), gateway.rest, str(keys), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, says in done.stdout + done.stderr) == (status, True), done
