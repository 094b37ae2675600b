"""The out-of-tree platform of this folder, installed as a user installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "plain"


@pytest.fixture(scope="session")
def plain_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path, with `headwater-platform-plain` in it; nothing is fetched."""
    folder = tmp_path_factory.mktemp("plain")
    # A build leaves files beside its source.
    source = shutil.copytree(
        SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__")
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    command += ["--disable-pip-version-check", f"--target={folder / 'site'}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def with_path(site: Path) -> dict[str, str]:
    """The environment with a folder on Python's path."""
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join((str(site), *known))}
