"""Variables that lines for a shell export."""

from __future__ import annotations

import shlex


def exported(lines: str) -> dict[str, str]:
    words = (shlex.split(line) for line in lines.splitlines())
    pairs = (word.partition("=") for command, word in words if command == "export")
    return {name: value for name, _, value in pairs}
