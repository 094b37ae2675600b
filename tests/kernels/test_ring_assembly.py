"""Checks of the assembly of kernels that have weights before their rows; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels import ring_assembly

COPY = "cp.async.bulk.tensor"


@pytest.mark.long
def test_weights_of_rings_and_of_a_token_are_asked_for_before_the_rows_are_there() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", ring_assembly.__name__]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout.splitlines()[-1])
    assert len(programs) == 7
    for name, program in programs.items():
        assert program["shared"] <= program["most"] + 512, name
        before, after = program["ptx"].split("griddepcontrol.wait")
        assert COPY in before, name
        assert "wgmma.mma_async" in after, name
