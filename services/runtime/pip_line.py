"""The command that installs an extra for the Python that runs."""

from __future__ import annotations

import shlex
import sys


def pip_line(extra: str) -> str:
    """One line for a shell; the requirement is quoted, since shells read brackets."""
    return f"{shlex.quote(sys.executable)} -m pip install 'headwater[{extra}]'"
