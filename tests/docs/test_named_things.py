"""What users address by name is in the documentation: metrics, headers, limits, flags of platforms,
variables."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from headwater.engine_core.platforms.capabilities import Capabilities
from headwater.gateway.http.app import EXPOSED
from headwater.gateway.tenancy.records import Limits

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FAMILIES = re.compile(
    "_?(counter|gauge|labelled|distribution)|(Labelled)?(Counter|Gauge|Histogram|Info)(MetricFamily)?"
)
"""Names of the functions and classes that make a metric, whose name is their first argument."""
CALLER = ("caller", "tenants")
"""Files that read headers of requests."""
NOT_OF_AN_ANSWER = {
    "x-content-type-options",
    "x-accel-buffering",
    "x-tenant",
    "x-gzip",
    "x-api-key",
    "x-forwarded-prefix",
}
"""Texts like headers that no script reads of an answer: two are for browsers and proxies, the
others come with requests."""


def nodes_in(*rooms: str) -> Iterator[ast.AST]:
    for path in (
        path for room in rooms for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name
    ):
        yield from ast.walk(ast.parse(path.read_text()))


def calls_among(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.Call, str]]:
    """Calls with a text as their first argument, and the text."""
    for node in nodes:
        first = node.args[0] if isinstance(node, ast.Call) and node.args else None
        if (
            isinstance(node, ast.Call)
            and isinstance(first, ast.Constant)
            and isinstance(first.value, str)
        ):
            yield node, first.value


def texts_of(*paths: Path) -> Iterator[str]:
    """Texts in the code, those of bytes included."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
                yield node.value.decode() if isinstance(node.value, bytes) else node.value


def metric_names() -> set[str]:
    """Names without the prefix that all have."""
    nodes = list(nodes_in("gateway", "services"))
    names = {
        text.removeprefix("headwater_")
        for call, text in calls_among(nodes)
        if re.fullmatch("[a-z_]+", text)
        and FAMILIES.fullmatch(ast.unparse(call.func).rpartition(".")[2])
    }
    # Tables of gauges have the names as their keys.
    tables = [node for node in nodes if isinstance(node, ast.Dict)]
    keys = {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}
    gauges = {
        key for key in keys if isinstance(key, str) and re.fullmatch("headwater_[a-z_]+", key)
    }
    names |= {key.removeprefix("headwater_") for key in gauges}
    assert {"router_trust", "request_success", "kv_leases", "requests_refused"} <= names, (
        "the search finds metrics"
    )
    return names


def test_every_metric_is_in_the_documentation() -> None:
    text = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    # Marked texts once: a search of all pages for each metric took a second.
    marked = set(re.findall(r"`([a-z_]+)(?=[`{])", text))
    spellings = list(
        itertools.product(("", "headwater_"), ("", "router_"), ("", "_total", "_info"))
    )
    absent = {
        name
        for name in metric_names()
        if marked.isdisjoint(f"{house}{room}{name}{end}" for house, room, end in spellings)
    }
    assert not absent, f"{absent}: add them to the table of metrics in docs/observability.md"


def test_every_header_of_a_request_is_in_the_documentation() -> None:
    headers = {
        text
        for text in texts_of(*(ROOT / "gateway/tenancy" / f"{name}.py" for name in CALLER))
        if re.fullmatch("x-[a-z-]+", text)
    }
    assert {"x-priority", "x-api-key"} <= headers
    absent = {name for name in headers if f"`{name}" not in (DOCS / "api.md").read_text()}
    assert not absent, f"{absent}: add them to the headers in docs/api.md"


def test_a_page_of_another_origin_may_read_every_header_of_an_answer() -> None:
    files = (
        path
        for room in ("http", "openai", "anthropic", "ollama", "wire", "admin")
        for path in (ROOT / "gateway" / room).rglob("*.py")
    )
    headers = {
        text
        for text in texts_of(*files)
        if re.fullmatch("x-[a-z-]+[a-z]|retry-after|request-id", text)
    }
    assert {"x-request-id", "request-id"} <= headers
    assert headers - NOT_OF_AN_ANSWER <= {*EXPOSED}, (
        "add the header to EXPOSED of gateway/http/app.py"
    )


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_every_limit_of_tenants_is_in_the_documentation(name: str) -> None:
    assert f"`{name}`" in (DOCS / "tenants.md").read_text(), "add the limit to docs/tenants.md"


def test_every_flag_of_a_platform_is_in_the_documentation() -> None:
    text = (DOCS / "platforms.md").read_text()
    absent = [
        field.name for field in dataclasses.fields(Capabilities) if f"`{field.name}`" not in text
    ]
    assert absent == [], "add the flag to the table of flags in docs/platforms.md"


def test_every_variable_of_compose_is_in_the_documentation() -> None:
    variables = set(re.findall(r"\$\{([A-Z_]+)", (ROOT / "compose.yaml").read_text()))
    assert "HEADWATER_KEY" in variables
    text = (DOCS / "compose.md").read_text() + (DOCS / "secrets.md").read_text()
    absent = {name for name in variables if not re.search(rf"`{name}[`=]", text)}
    assert not absent, "add the variable to the table of variables in docs/compose.md"
