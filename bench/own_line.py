"""A line of a benchmark's own: started on free ports in a folder that goes with it, ended as Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwater.services.stack.line_file import LineRecord, read_line

LIMIT_SECONDS = 180.0


class LineFailed(Exception):
    """The line did not start; carries what it said."""


@contextlib.contextmanager
def own_line(flags: Sequence[str]) -> Iterator[tuple[LineRecord, Path]]:
    """`headwater up` with these flags and its state folder, for the length of a scope. Raises `LineFailed`."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "headwater.services.cli", "up", f"--state-dir={folder}"]
        with (folder / "up.log").open("wb") as log:
            line = subprocess.Popen([*command, "--port=0", "--grpc-port=0", *flags], stdout=log, stderr=log)
        try:
            yield _wait_for(folder, line), folder
        finally:
            line.send_signal(signal.SIGINT)
            line.wait()


def _wait_for(folder: Path, line: subprocess.Popen[bytes]) -> LineRecord:
    end = time.monotonic() + LIMIT_SECONDS
    while (record := read_line(folder)) is None:
        if line.poll() is not None or time.monotonic() > end:
            raise LineFailed((folder / "up.log").read_text().strip())
        time.sleep(0.01)
    return record
