"""The page of errors has each code that clients can get, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "errors.md"
ROOMS = ("gateway", "services/runtime", "services/grammars", "services/engine/stage")
CODE = re.compile(r"[a-z]+(_[a-z]+)+|asleep|draining|overloaded|starting|unavailable")


def assigned(node: ast.AST) -> ast.expr | None:
    """What `code` is set to, as an argument or an attribute of a class."""
    match node:
        case ast.keyword(arg="code", value=value):
            return value
        case ast.Assign(targets=[ast.Name("code")], value=value):
            return value
        case ast.AnnAssign(target=ast.Name("code"), value=value):
            return value
    return None


def codes() -> Iterator[str]:
    paths = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    for path in paths:
        text = path.read_text()
        if "_pb2" in path.name or not re.search(r"\bcode\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if (value := assigned(node)) is not None:
                for each in ast.walk(value):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        yield each.value


def test_each_code_of_an_error_is_on_the_page() -> None:
    found = {code for code in codes() if CODE.fullmatch(code)}
    assert {"no_replica", "invalid_value", "slow_body"} <= found
    assert found - set(re.findall(r"`([a-z_]+)`", PAGE.read_text())) == set()


def test_the_page_has_no_code_that_there_is_not() -> None:
    sources = "".join(
        path.read_text() for room in ("gateway", "services") for path in (ROOT / room).rglob("*.py")
    )
    words = set(re.findall(r"[a-z_]+", sources))
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE.read_text()))
    # Made of the kind of what is missing: `path_not_found`.
    assert {name for name in named if not name.endswith("_not_found")} - words == set()
