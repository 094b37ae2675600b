"""Renders the table of docs/choosing.md by the console's calculator of memory: `python -m
tests.docs.choosing`. Needs node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "choosing.md"
PROGRAM = ROOT / "tests" / "gateway" / "js" / "memory_client.js"
BEGIN = "<!-- rendered by `python -m tests.docs.choosing` -->\n"
END = "<!-- end of the table -->\n"


def table() -> str:
    """The table, a row a model and kind of weights."""
    reported = json.loads(subprocess.check_output(["node", str(PROGRAM)]))
    lines = [
        ["model", "weights", *(f"{each} GB" for each in reported["gigabytes"])],
        ["---"] * (2 + len(reported["gigabytes"])),
        *(
            [*row[:2], *("–" if each == 0 else each for each in row[2:])]
            for row in reported["rows"]
        ),
    ]
    return "\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines) + "\n"


def rendered(page: str) -> str:
    """The page with the table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
