"""Environments of a test's own, for clients that are no dependency of the project: the newest
releases, by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL_SECONDS = 900
OUT_OF_REACH = (
    *(
        "NewConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "Temporary failure in name resolution",
    ),
    *(
        "No matching distribution found",
        "ENOTFOUND",
        "EAI_AGAIN",
        "ETIMEDOUT",
        "ECONNREFUSED",
        "ECONNRESET",
    ),
)
"""What pip and npm say where no registry answers; pip finds no distribution then."""


def python_with(folder: Path, *packages: str) -> str:
    """A Python that has the packages. Skips the test where the registry does not answer."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    _install(
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages],
        folder,
    )
    return str(python)


def node_with(folder: Path, *packages: str) -> Path:
    """A folder in which node finds the packages. Skips the test without node, or where the registry
    does not answer."""
    if shutil.which("npm") is None:
        pytest.skip("node is missing")
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true}')
    _install(["npm", "install", "--no-audit", "--no-fund", *packages], folder)
    return folder


def _install(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    if done.returncode != 0:
        output = done.stderr or done.stdout
        if any(sign in output for sign in OUT_OF_REACH):
            pytest.skip(f"the registry does not answer: {output.strip().splitlines()[-1][:200]}")
        raise AssertionError(output[-3000:])
