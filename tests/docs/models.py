"""Renders the table of architectures in docs/models.md from the registry: `python -m
tests.docs.models`."""

from __future__ import annotations

from pathlib import Path

from headwater.engine_core.models.architecture import Architecture
from headwater.engine_core.models.registry import ARCHITECTURES
from headwater.engine_core.weights.formats import gguf_families

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- rendered by `python -m tests.docs.models` -->\n"
END = "\n<!-- end of the table -->\n"
HEAD = """
| models | `architectures` | file | GGUF | limits |
|---|---|---|---|---|
"""


def table() -> str:
    """The table, a row an architecture."""
    of_gguf = gguf_families.architectures()
    rows = [
        _row(name, each, "yes" if name in of_gguf else "") for name, each in ARCHITECTURES.items()
    ]
    return HEAD + "".join(sorted(rows, key=str.lower))


def _row(name: str, architecture: Architecture, of_gguf: str) -> str:
    module = architecture.model.partition(":")[0].rpartition(".")[2]
    limits = ["text; images are refused"] if architecture.is_text_part else []
    limits += architecture.limits
    return (
        f"| {architecture.family} | `{name}` | `{module}.py` | {of_gguf} | {'; '.join(limits)} |\n"
    )


def rendered(page: str) -> str:
    """The page with the table of the registry."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
