"""What processes that tests start say on standard error: kept in files, since nobody reads a pipe
before it is full."""

from __future__ import annotations

import os
import tempfile

MAX_SHOWN_BYTES = 20_000


class StageLog:
    """Of one process. What it says while a test runs is shown if the test fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.file, path = tempfile.mkstemp()
        os.unlink(path)
        self.is_over = False
        self._shown = 0
        _LOGS.append(self)

    def text(self, since: int = 0) -> str:
        return os.pread(self.file, self._size() - since, since).decode(errors="replace")

    def new_text(self) -> str:
        """Since the last `mark`, or the end of it."""
        return self.text(max(self._shown, self._size() - MAX_SHOWN_BYTES))

    def mark(self) -> None:
        self._shown = self._size()

    def _size(self) -> int:
        return os.fstat(self.file).st_size


_LOGS: list[StageLog] = []


def mark_all() -> None:
    """A test begins: what was said before is not about it."""
    for log in [log for log in _LOGS if log.is_over]:
        os.close(log.file)
        _LOGS.remove(log)
    for log in _LOGS:
        log.mark()


def sections() -> list[tuple[str, str]]:
    """Title and text of all that was said since the test began."""
    output = [(log.name, log.new_text()) for log in _LOGS]
    return [(f"log of {name}", text) for name, text in output if text]
