"""Draws docstrings and comments at random, for a reader who judges whether they can be understood
without the code around them: `python -m tests.words --seed 7`."""

from __future__ import annotations

import argparse
import ast
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("gateway", "services", "engine_core", "kernels", "bench")
TOOL_COMMENTS = re.compile(r"# (noqa|type:|pragma|fmt:|mypy:)|#!")
"""Comments that are written for a tool."""


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a file with their lines; comment lines that follow each other are
    one text."""
    for node in ast.walk(ast.parse(path.read_text())):
        # The body of a lambda is an expression, not a list.
        for each in body if isinstance(body := getattr(node, "body", None), list) else ():
            match each:
                case ast.Expr(value=ast.Constant(value=str(docstring))):
                    yield each.lineno, docstring
    last_line = -1
    found: list[tuple[int, str]] = []
    with tokenize.open(path) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type != tokenize.COMMENT or TOOL_COMMENTS.match(token.string):
                continue
            line = token.start[0]
            text = token.string.lstrip("# ")
            if line == last_line + 1:
                found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
            else:
                found.append((line, text))
            last_line = line
    yield from found


def draw(seed: int, num_texts: int) -> list[str]:
    texts = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(text.split())}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if "_pb2" not in path.name
        for line, text in texts_of(path)
    ]
    return random.Random(seed).sample(texts, num_texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--num", type=int, default=60)
    arguments = parser.parse_args()
    print("\n\n".join(draw(arguments.seed, arguments.num)))
