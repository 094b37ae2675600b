"""Limits on JSON: exact at their borders, blind to what stands inside of strings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.services.runtime import json_limits
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.json_limits import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_EXPONENTS,
    MAX_LONG_DIGITS,
    MAX_STRINGS,
    MAX_VALUES,
    JsonCounts,
    behind_string,
    check_json,
    counted,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


def listed(entry: bytes, count: int) -> bytes:
    return b"[%b]" % b",".join([entry] * count)


BORDERS = {
    "levels of objects and lists": (MAX_DEPTH, lambda n: b"[" * n + b"]" * n),
    "levels, not closed": (MAX_DEPTH, lambda n: b'{"a":' * n),
    "numbers with an exponent": (MAX_EXPONENTS, lambda n: listed(b"1e308", n)),
    "numbers with a capital exponent": (MAX_EXPONENTS, lambda n: listed(b"-1.E+308", n)),
    "digits in numbers": (MAX_LONG_DIGITS, lambda n: b"1" * n),
    "objects and lists": (MAX_CONTAINERS, lambda n: listed(b"{}", n - 1)),
    "strings": (MAX_STRINGS, lambda n: listed(b'""', n)),
    "entries of objects and lists": (MAX_VALUES, lambda n: b"[1%b]" % (b",1" * n)),
}


@pytest.mark.parametrize("name", BORDERS)
def test_json_is_refused_one_above_each_limit(name: str) -> None:
    most, make = BORDERS[name]
    check_json(make(most), "field")
    with pytest.raises(BadRequest) as refused:
        check_json(make(most + 1), "field")
    assert refused.value.message.startswith(
        f"field has more than {most} {name.partition(',')[0]}"[:30]
    )
    assert (refused.value.param, refused.value.code) == ("field", "json_too_costly")


CLIENTS: dict[str, Any] = {
    "inputs": {"input": ["a text"] * 2048},
    "prompts of ids": {"prompt": [[1, 2, 3] * 100] * 1024},
    "a history": {"messages": [{"role": "user", "content": "Hello", "name": "ada"}] * 5000},
    "tools": {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            f"p{i}": {"type": "string", "description": "a part"} for i in range(40)
                        },
                    },
                },
            }
        ]
        * 256
    },
}


@pytest.mark.parametrize("name", CLIENTS)
def test_what_clients_send_stays_below_the_limits(name: str) -> None:
    check_json(json.dumps(CLIENTS[name]).encode())


def test_an_object_of_a_quarter_million_names_is_refused() -> None:
    """Four of them held up a gateway's long bodies for seconds."""
    with pytest.raises(BadRequest, match="strings"):
        check_json(json.dumps(dict.fromkeys(map(str, range(250_000)), 1)).encode())


@pytest.mark.parametrize(
    "text", ["1e308," * 1000, "[" * 1000, '\\" 1e5 \\\\' * 1000, "9" * 100_000, "\\u00e9" * 70_000]
)
def test_what_stands_in_strings_is_text(text: str) -> None:
    check_json(b'{"prompt":"%b"}' % text.encode())


@pytest.mark.parametrize("text", [b"", b'"', b'"\\', b'"a\\"', b"]]]]", b"\xff\xfe", b'{"a'])
def test_what_is_no_json_is_left_to_the_decoder(text: bytes) -> None:
    check_json(text)


@settings(max_examples=40)
@given(JSON, st.sampled_from([None, 1]), st.booleans())
def test_counts_are_those_of_the_parsed_value(value: Any, indent: int | None, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode(errors="surrogatepass")
    *_, counts = counted(text)
    found = JsonCounts()
    _count(value, 0, found)
    assert (counts.depth, counts.containers, counts.strings) == (
        found.depth,
        found.containers,
        found.strings,
    )


def _count(value: Any, depth: int, counts: JsonCounts) -> None:
    if isinstance(value, str):
        counts.strings += 1
    elif isinstance(value, list | dict):
        counts.containers += 1
        counts.depth = max(counts.depth, depth + 1)
        if isinstance(value, dict):
            counts.strings += len(value)
            value = list(value.values())
        for each in value:
            _count(each, depth + 1, counts)


def test_short_strings_are_passed_over_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, the names of one refused object took the interpreter 67 ms."""
    calls = []

    def counting(text: bytes, at: int) -> int:
        calls.append(at)
        return behind_string(text, at)

    monkeypatch.setattr(json_limits, "behind_string", counting)
    text = b"{" + b",".join(b'"name %d":[]' % i for i in range(50_000)) + b"}"
    *_, counts = counted(text)
    assert (counts.strings, counts.containers) == (50_000, 50_001)
    assert len(calls) < 10
