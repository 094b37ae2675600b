"""Lists the longest files and functions of each room, and how much code it has: `make sizes`. A
report, no limit: a file past 400 lines or a function past 40 is worth a second look, and is divided
or left, never squeezed."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ROOMS = ("gateway", "services", "engine_core", "kernels", "bench")
LONG_FILE = 400
LONG_FUNCTION = 40
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(path: Path) -> Iterator[tuple[Function, int]]:
    """The functions of a file with the lines of their bodies, without docstrings and the functions
    inside them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            inner = [each for part in body for each in ast.walk(part) if isinstance(each, Function)]
            lines = {
                line for part in body for line in range(part.lineno, (part.end_lineno or 0) + 1)
            }
            for each in inner:
                lines -= set(range(each.lineno, (each.end_lineno or 0) + 1))
            yield node, len(lines)


def num_characters(path: Path) -> int:
    """Characters of code, without docstrings, comments and white space."""
    text = path.read_text()
    docstrings = {
        (each.lineno, each.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(body := getattr(node, "body", None), list)
        for each in body
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
    }
    return sum(
        len("".join(token.string.split()))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type != tokenize.COMMENT and token.start not in docstrings
    )


def print_room(room: str) -> None:
    files = [path for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    functions = [(path, node, size) for path in files for node, size in functions_of(path)]
    print(
        f"{room}: {sum(map(num_characters, files)) / 1e3:.1f} kB of code;"
        f" {len(files)} files, median {median(lengths.values()):.0f} lines;"
        f" {len(functions)} functions, median {median(size for *_, size in functions):.0f} lines"
    )
    for path, num_lines in sorted(lengths.items(), key=lambda pair: -pair[1]):
        if num_lines > LONG_FILE:
            print(f"  {path.relative_to(ROOT)}: {num_lines} lines")
    for path, node, num_lines in sorted(functions, key=lambda found: -found[2]):
        if num_lines > LONG_FUNCTION:
            print(f"  {path.relative_to(ROOT)}:{node.lineno} {node.name}: {num_lines} lines")


if __name__ == "__main__":
    for each in ROOMS:
        print_room(each)
