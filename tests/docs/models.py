"""Renders the table of architectures in docs/models.md from the registry: `python -m
tests.docs.models`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from headwater.engine_core.models.architecture import Architecture
from headwater.engine_core.models.registry import ARCHITECTURES
from headwater.engine_core.weights.formats import gguf_families

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- rendered by `python -m tests.docs.models` -->\n"
END = "\n<!-- end of the table -->\n"
HEAD = """
| models | `architectures` | GGUF | limits |
|---|---|---|---|
"""


def table() -> str:
    """The table, a row an architecture. Limits of several families are letters, which are explained
    below it."""
    of_gguf = gguf_families.architectures()
    counts = Counter("; ".join(each.limits) for each in ARCHITECTURES.values())
    shared = sorted(limits for limits, count in counts.items() if limits and count > 1)
    letters = dict(zip(shared, "abcdefgh", strict=False))
    rows = [
        _row(name, each, "yes" if name in of_gguf else "", letters)
        for name, each in ARCHITECTURES.items()
    ]
    notes = ". ".join(
        ["*t*: text; images are refused"]
        + [f"*{letter}*: {limits}" for limits, letter in letters.items()]
    )
    lines = textwrap.fill(f"{notes}.", 120, break_long_words=False, break_on_hyphens=False)
    return HEAD + "".join(sorted(rows, key=str.lower)) + f"\n{lines}\n"


def _row(name: str, architecture: Architecture, of_gguf: str, letters: Mapping[str, str]) -> str:
    limits = ["*t*"] if architecture.is_text_part else []
    if own := "; ".join(architecture.limits):
        limits.append(f"*{letters[own]}*" if own in letters else own)
    return f"| {architecture.family} | `{name}` | {of_gguf} | {', '.join(limits)} |\n"


def rendered(page: str) -> str:
    """The page with the table of the registry."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
