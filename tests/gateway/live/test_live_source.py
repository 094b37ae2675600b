"""Reconnection of the console after its stream of snapshots ended with an error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from headwater.gateway.openai.errors import envelope
from headwater.services.runtime.errors import HeadwaterError, InternalError, KeyRevoked, SlowReader


@pytest.mark.parametrize(
    ("error", "states"),
    [
        (SlowReader(30.0), ["waiting", "live"]),
        (InternalError("an internal fault; the log has it"), ["waiting", "live"]),
        (KeyRevoked("the key is gone"), ["refused"]),
    ],
    ids=lambda reported: type(reported).__name__,
)
@pytest.mark.long
def test_only_a_key_that_is_gone_keeps_the_console_from_coming_back(
    error: HeadwaterError, states: list[str], js_folder: Path
) -> None:
    command = ["node", str(js_folder / "live_client.js"), json.dumps(envelope(error)["error"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == states
