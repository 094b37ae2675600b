"""The blocks of code on the pages: each says whether it is run, and those that are do what they
say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, Block, blocks_of, name_of
from tests.forked_cluster import ForkedCluster
from tests.line.conftest import DEMO_ENV, Line

LANGUAGES = ("sh", "python")
ADMIN_KEY = "admin-key-of-the-house"
DEPLOYMENTS = ("deployment", "administrators", "tutorial", "embedder")
IN_CI = "deployment"
"""The deployment whose blocks `make test` runs; `make test-long` runs the others."""
RUNNABLE = [block for page in PAGES for block in blocks_of(page) if block.mark == "run"]
SECONDS = 120
# The simulated model comes to no end by itself: answers end with the context.
FLAGS = ("--executor=simulated", "--replicas=1", "--max-model-len=512")
PACE = {"HEADWATER_SIMULATED_STEP_SECONDS": "0.001"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_whether_it_is_run_or_why_not(page: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.language in LANGUAGES]
    unmarked = [block.name for block in blocks if not block.mark]
    without_reason = [
        block.name for block in blocks if block.mark == "not run" and not block.reported
    ]
    unknown = [
        block.name for block in blocks if block.mark == "run" and block.reported not in DEPLOYMENTS
    ]
    assert (unmarked, without_reason, unknown) == ([], [], [])


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A deployment without keys."""
    with Line(tmp_path_factory.mktemp("deployment"), *FLAGS, env=PACE, start=ForkedCluster) as line:
        yield line
        line.stop()


@pytest.fixture(scope="module")
def administrators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A deployment that keeps tenants."""
    env = PACE | {"HEADWATER_ADMIN_KEY": ADMIN_KEY}
    with Line(
        tmp_path_factory.mktemp("administrators"), *FLAGS, env=env, start=ForkedCluster
    ) as line:
        yield line
        line.stop()


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A deployment that keeps tenants and has two engines, whose answers take seconds."""
    flags = [flag for flag in FLAGS if "replicas" not in flag]
    env = {"HEADWATER_ADMIN_KEY": ADMIN_KEY, "HEADWATER_SIMULATED_STEP_SECONDS": "0.02"}
    with Line(
        tmp_path_factory.mktemp("tutorial"), *flags, "--replicas=2", env=env, start=ForkedCluster
    ) as line:
        yield line
        line.stop()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A deployment of the demo model and an embedder beside it, which compute."""
    models = ("--model=smollm2-135m-instruct", "--model=all-minilm-l6-v2", "--replicas=1")
    folder = tmp_path_factory.mktemp("embedder")
    with Line(folder, *models, env=DEMO_ENV, start=ForkedCluster) as line:
        yield line
        line.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the blocks run, with the commands that they name."""
    home = tmp_path_factory.mktemp("commands")
    commands = {
        "headwater": f'exec {sys.executable} -m headwater.services.cli "$@"',
        "python": f'exec {sys.executable} "$@"',
        # An answer that is a refusal is a failure.
        "curl": f'exec {shutil.which("curl")} --silent --show-error --fail-with-body "$@"',
    }
    (home / "bin").mkdir()
    for name, script in commands.items():
        (home / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (home / "bin" / name).chmod(0o755)
    return home


def adapted(code: str, rest: str) -> str:
    """A block for a deployment on another port, with a key in place of the one that a reader fills
    in."""
    for host in ("127.0.0.1", "localhost"):
        code = code.replace(f"http://{host}:8000", rest)
    return code.replace("HEADWATER_ADMIN_KEY=…", f"HEADWATER_ADMIN_KEY={ADMIN_KEY}")


def is_in_ci(block: Block) -> bool:
    """Whether `make test` runs the block: those of the README do, on a simulated cluster; each
    takes some seconds."""
    return block.reported == IN_CI and block.page == "README.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.name, marks=() if is_in_ci(block) else pytest.mark.long)
        for block in RUNNABLE
    ],
)
def test_a_block_that_is_run_does_what_it_says(
    block: Block, folder: Path, request: pytest.FixtureRequest
) -> None:
    line: Line = request.getfixturevalue(block.reported)
    code = adapted(block.code, line.record.rest)
    command = (
        ["bash", "-euo", "pipefail", "-c", code]
        if block.language == "sh"
        else [sys.executable, "-c", code]
    )
    # Blocks of one page share a folder: one may write what the next one reads.
    here = folder / block.page.replace("/", "-")
    here.mkdir(exist_ok=True)
    env = os.environ | {
        "HEADWATER_ADMIN_KEY": ADMIN_KEY,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HEADWATER_STATE_DIR": str(line.state_dir),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env, cwd=here
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def test_some_blocks_are_run() -> None:
    assert {block.language for block in RUNNABLE} == set(LANGUAGES)
    assert {block.reported for block in RUNNABLE} == set(DEPLOYMENTS)
