from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "figure"),
    [
        (("overhead", "--rate=40", "--seconds=1", "--no-pin"), "gateway_cpu_ms_per_request"),
        (("streams", "--streams=8", "--seconds=1"), "gateway_kib_per_stream"),
    ],
)
def test_a_gateway_is_weighed(args: tuple[str, ...], figure: str) -> None:
    command = [sys.executable, "-m", "headwater.bench.gateway_load", *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    figures = json.loads(done.stdout)
    assert figures[figure] > 0
    assert figures.get("failed", 0) == 0
