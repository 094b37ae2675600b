"""A text file that drops what it cannot write, so that a program continues when its disk is full or
its pipe has no reader."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, TextIO


class BestEffortFile:
    """`file`, for loggers and terminals, whose `write` and `flush` raise no `OSError`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._attempt(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BrokenPipeError:
            # A reader never returns. Buffered text would fail again when the interpreter exits, and
            # change its exit status.
            with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())
        except OSError:
            pass
