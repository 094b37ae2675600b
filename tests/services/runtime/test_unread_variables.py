"""Variables that nothing reads: a mistyped name is told, with the one that was meant."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import structlog

from headwater.services.runtime.process import PARENT_FD
from headwater.services.runtime.unread_variables import unread_variables, warn_of_unread_variables
from tests.long_values import long_but
from tests.services.runtime.known_variables import LIST, names, text_of

MISTYPED = {"HEADWATER_MAX_NUM_SEQ": "4", "HEADWATER_MAX_NUM_SEQS": "4", "MAX_NUM_SEQ": "4"}
SENTENCE = (
    "HEADWATER_MAX_NUM_SEQ is set, and nothing reads a variable of this name; did you "
    "mean HEADWATER_MAX_NUM_SEQS?"
)
STAGES = {
    "gateway": ["--port=0", "--grpc-port=0"],
    # Without what they read these do not come far.
    "services.processor": ["--model-folder=/nowhere"],
    "services.output_processor": ["--model-folder=/nowhere"],
    "services.engine": ["--executor=simulated", "--served-model-name=m", "--max-model-len=64"],
    "services.engine.programs.stage_host": [
        "--join=127.0.0.1:1",
        "--stage-secret-file=/nowhere",
        "--model-folder=/nowhere",
    ],
}


def test_the_list_of_known_names_is_that_of_the_code() -> None:
    assert LIST.read_text() == text_of(names()), (
        "python -m tests.services.runtime.known_variables writes it"
    )


def test_a_mistyped_name_is_reported_with_the_nearest_one() -> None:
    assert unread_variables(MISTYPED) == [SENTENCE]


def test_a_name_like_no_other_is_reported_without_a_guess() -> None:
    [sentence] = unread_variables({"HEADWATER_XYZZY": "a secret"})
    assert sentence.startswith("HEADWATER_XYZZY is set, ")
    assert sentence.endswith("; docs/configuration.md lists those that are read")


def test_a_stage_leaves_it_to_its_supervisor() -> None:
    with structlog.testing.capture_logs() as logged:
        warn_of_unread_variables(MISTYPED | {PARENT_FD: "3"})
        assert not logged
        warn_of_unread_variables(MISTYPED)
    assert [each["event"] for each in logged] == [SENTENCE]


@pytest.mark.parametrize("module", long_but(STAGES, "services.processor"))
def test_a_stage_that_is_started_by_itself_reports_it(module: str) -> None:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")
    } | MISTYPED
    command = [sys.executable, "-m", f"headwater.{module}", *STAGES[module]]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as stage:
        assert stage.stderr is not None
        try:
            printed = next(
                (line for line in stage.stderr if SENTENCE in line or '"event": "ready"' in line),
                "",
            )
        finally:
            stage.kill()
    assert SENTENCE in printed
