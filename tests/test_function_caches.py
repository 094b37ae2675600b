"""Caches of functions in the stages: none has a key of a size, or a number of keys, that clients
choose, and none shows a tenant by its time what others use."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KNOWN = {
    "gateway/wire/body.py:_copy_of_kind": "a type of this program",
    "gateway/http/document.py:openapi_document": "the version of this program",
    "gateway/wire/decode.py:_decoder": "a type of this program",
    "gateway/wire/decode.py:_hints": "a type of this program",
    "gateway/tenancy/cache_namespace.py:_unsalted": "a tenant, a served model and adapter",
    "gateway/tenancy/cache_namespace.py:_tenant_secret": "the key of a tenant, 64 characters",
    "services/grammars/counted_text.py:_moves": "the mark of a model's reasoning",
    "services/grammars/grammars.py:_read": "a model's folder and the times of its files",
    "services/grammars/json_string_grammar.py:_bytes": "nothing",
    "services/runtime/hardware.py": "nothing",
    "services/stack/own_settings.py:_kinds": "nothing",
    "services/text/sentencepiece_file.py:_message_class": "nothing",
    "services/runtime/version.py:commit": "nothing",
}
"""By function, or by file for all of its functions: what the keys are."""


@pytest.fixture(scope="module")
def cached_functions() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.name}"
        for room in ("gateway", "services")
        for path in sorted((ROOT / room).rglob("*.py"))
        # To parse every file is most of the time of these tests.
        if "cache" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and any(map(is_cache, node.decorator_list))
    ]


def is_cache(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    last = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
    return last in ("cache", "lru_cache")


def test_every_cache_of_a_function_has_keys_that_no_client_chooses(
    cached_functions: list[str],
) -> None:
    unknown = [
        name
        for name in cached_functions
        if name not in KNOWN and name.partition(":")[0] not in KNOWN
    ]
    assert not unknown, "what clients choose goes into a TenantCache, bounded in bytes"


def test_every_known_cache_is_there(cached_functions: list[str]) -> None:
    found = set(cached_functions)
    files = {name.partition(":")[0] for name in found}
    assert KNOWN.keys() <= found | files
