"""services/runtime/known_variables.py, collected from where variables are declared or read:
`python -m tests.services.runtime.known_variables` writes it."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from headwater.services.runtime.security_settings import StageSecuritySettings
from headwater.services.stack.flags import variable_of
from headwater.services.stack.settings import StackSettings
from tests.docs.configuration import STAGES

ROOT = Path(__file__).parents[3]
LIST = ROOT / "services" / "runtime" / "known_variables.py"
ROOMS = ("gateway", "services", "engine_core", "kernels", "bench")
NAME = re.compile(r"HEADWATER_[A-Z0-9_]*[A-Z0-9]")
READ_BY_A_TEST = re.compile(r'environ(?:\.get\(|\[)"(HEADWATER_\w+)"')


def names() -> list[str]:
    """Names of all variables that a process, a container or a test of the project reads."""
    return sorted({*_of_settings(), *_of_code(), *_of_deployment(), *_of_tests()})


def text_of(known: list[str]) -> str:
    rows = "".join(f'        "{name}",\n' for name in known)
    return f'''"""Names of the variables that the project reads, written by
tests.services.runtime.known_variables."""

from __future__ import annotations

KNOWN = frozenset(
    {{
{rows}    }}
)
'''


def _of_settings() -> Iterator[str]:
    yield from (variable_of(field) for field in dataclasses.fields(StackSettings))
    for settings in (StageSecuritySettings, *(settings for _, settings in STAGES.values())):
        yield from (f"HEADWATER_{field.name.upper()}" for field in dataclasses.fields(settings))


def _of_code() -> Iterator[str]:
    """Names that code has as a string of their own: of a variable that it reads, or sets for a
    child."""
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path != LIST):
        # Most files name none; to parse them all takes seconds.
        if "HEADWATER_" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and NAME.fullmatch(node.value)
            ):
                yield node.value


def _of_deployment() -> Iterator[str]:
    """Names that containers, charts and scripts set or read."""
    for path in (ROOT / "compose.yaml", ROOT / "Makefile", *(ROOT / "deploy").rglob("*")):
        if path.is_file() and path.suffix not in (".pyc", ".txt"):
            yield from NAME.findall(path.read_text())


def _of_tests() -> Iterator[str]:
    for path in (ROOT / "tests").rglob("*.py"):
        yield from READ_BY_A_TEST.findall(path.read_text())


if __name__ == "__main__":
    LIST.write_text(text_of(names()))
