"""The page about models and memory has the table of the console's calculator, which counts
right."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.docs.choosing import PAGE, PROGRAM, rendered

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is missing")
LLAMA_8B = {"billions": 8.0, "layers": 32, "kvHeads": 8, "headDim": 128, "kvBits": 16}


def needs(**values: object) -> dict[str, float]:
    command = ["node", str(PROGRAM), json.dumps(LLAMA_8B | values)]
    reported: dict[str, float] = json.loads(subprocess.check_output(command))
    return reported


def test_the_table_is_up_to_date() -> None:
    assert PAGE.read_text() == rendered(PAGE.read_text()), "run `python -m tests.docs.choosing`"


def test_weights_and_keys_are_counted_in_bytes() -> None:
    reported = needs(weights="bf16", gigabytes=24, context=8192)
    assert reported["weights"] == 16.0
    assert reported["token"] == pytest.approx(131_072 / 1e9)
    # 24 GB less a tenth and the weights are 5.6 GB; a user has 1.07.
    assert (reported["users"], reported["tokens"]) == (5, 42_724)
    assert needs(weights="bf16", gigabytes=24, context=8192, kvBits=8)["users"] == 10


def test_a_model_that_does_not_fit_serves_nobody() -> None:
    assert needs(weights="bf16", gigabytes=8, context=8192)["users"] == 0
