"""A folder with a model in several formats, as `tests/engine_core/make_format_files.py` makes it:
`bf16` beside the others, and `oracle.json`, the perplexities that others find of the same files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer

SOURCE = "bf16"
ORACLE = "oracle.json"
OPTION = "--formats"
MAKER = "tests/engine_core/make_format_files.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFile:
    """A model in one format."""

    source: str
    """A checkpoint's folder, or a GGUF file."""
    quantization: str = "auto"
    """Kind of weights to which the model is rounded when it is converted."""
    by_transformers: float | None = None
    """Perplexity of the file in transformers, with activations rounded where the file says so;
    None: transformers does not load it."""
    by_reading: float | None = None
    """Perplexity of a plain reading of the file's weights; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFiles:
    """Models to compare, and their reference."""

    against: str
    num_tokens: int
    """Tokens of the text that the oracles read."""
    files: tuple[FormatFile, ...]


def read_format_files(folder: Path, kinds: tuple[str, ...]) -> FormatFiles:
    """`kinds`: what the model in bfloat16 is rounded to beside the files. Raises `BadParameter`."""
    path = folder / ORACLE
    if not path.is_file():
        raise typer.BadParameter(
            f"{OPTION} is '{folder}'; allowed: a folder with {ORACLE}, as {MAKER} makes it"
        )
    noted = json.loads(path.read_text())
    source = str(folder / SOURCE)
    files = [
        FormatFile(
            source=_path_of(folder / name),
            by_transformers=found.get("transformers"),
            by_reading=found.get("plain"),
        )
        for name, found in noted["files"].items()
        if name != SOURCE
    ]
    files += [FormatFile(source=source, quantization=kind) for kind in kinds]
    return FormatFiles(against=source, num_tokens=noted["num_tokens"], files=tuple(files))


def _path_of(folder: Path) -> str:
    """The checkpoint of a format: its folder, or the GGUF file in it."""
    if not folder.is_dir():
        raise typer.BadParameter(
            f"{OPTION} is '{folder.parent}'; allowed: a folder with {folder.name}, which its "
            f"{ORACLE} names"
        )
    return str(next(folder.glob("*.gguf"), folder))
