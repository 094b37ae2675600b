"""Files of recorded requests that cannot be used: one sentence and exit code 2, before anything is
measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.bench.trace_file import TraceError
from tests.long_values import long_but
from tests.simulation.routing_traces import conversation

TRACE = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}
RECEIPT = {
    "replica_id": "a",
    "candidates": [],
    "predicted_cached_tokens": 0,
    "actual_cached_tokens": None,
    "predicted_prefill_seconds": 0.0,
    "actual_prefill_seconds": None,
}
BENCH = "headwater.bench"
COMMANDS = {
    "policies": [
        "tests.simulation.policy_replay",
        "--skip-ladder",
        "--policy=round robin",
        "--trace",
    ],
    "serve trace": [
        BENCH,
        "serve",
        "--base-url=http://127.0.0.1:9",
        "--warmup=1",
        "--dataset=trace",
        "--path",
    ],
    "serve jsonl": [
        BENCH,
        "serve",
        "--base-url=http://127.0.0.1:9",
        "--warmup=1",
        "--dataset=jsonl",
        "--path",
    ],
    "cluster": ["tests.simulation.cluster", "--trace"],
    "replay": [BENCH, "replay"],
}
BROKEN = {
    "policies": (
        TRACE,
        TRACE | {"input_length": "long"},
        "Expected `int`, got `str` - at `$.input_length`",
    ),
    "serve trace": (TRACE, TRACE | {"hash_ids": [-1]}, "Expected `int` >= 0 - at `$.hash_ids[0]`"),
    "serve jsonl": ({"prompt": "x"}, {}, "Object missing required field `messages` or `prompt`"),
    "cluster": (TRACE, {"timestamp": 1}, "Object missing required field `input_length`"),
    "replay": (
        {"event": "started"},
        {"event": "routed", "receipt": RECEIPT},
        "Expected `array` of length >= 1 - at `$.receipt.candidates`",
    ),
}


def refused(name: str, path: Path) -> str:
    """What the command says of the file."""
    module, *flags = COMMANDS[name]
    command = [sys.executable, "-m", module, *flags, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    program = f"headwater bench {flags[0]}" if module == BENCH else f"python -m {module}"
    output = done.stderr
    of_whom = f"{program}: {path}"
    assert output.startswith(of_whom)
    assert output.count("\n") == 1
    return output.removeprefix(of_whom).strip()


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.long
def test_a_file_without_requests_ends_the_command(name: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n \n")
    assert (
        refused(name, path)
        == f": there are no {'receipts' if name == 'replay' else 'requests'} in it"
    )


@pytest.mark.parametrize("name", long_but(COMMANDS, "policies"))
def test_a_line_that_is_no_request_is_named(name: str, tmp_path: Path) -> None:
    good, bad, problem = BROKEN[name]
    path = tmp_path / "requests.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(bad)}\n")
    assert refused(name, path) == f", line 3: {problem}"


@pytest.mark.long
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refused("policies", tmp_path / "none") == ": No such file or directory"
    assert refused("replay", tmp_path) == ": Is a directory"


@pytest.mark.parametrize("line", [b'{"timestamp": 1', b"\xff\xfe", b"[]"])
def test_a_line_that_is_cut_off_or_no_text_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(TRACE).encode() + b"\n" + line)
    with pytest.raises(TraceError) as raised:
        conversation(path)
    assert (raised.value.path, raised.value.line) == (path, 2)
    assert [each.num_output_tokens for each in conversation(path, limit=1)] == [9]
